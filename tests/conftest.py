"""What all tests share: several logical CPUs, asked for before the first is used."""

from allreduce.devices import set_logical_devices

set_logical_devices("CPU", 4)
