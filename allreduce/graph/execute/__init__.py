"""Run programs: frames, instructions, queues and native replay."""
