"""A model's steps against the same arithmetic written out in NumPy, in float64."""

from __future__ import annotations

import numpy as np

from allreduce import optim
from allreduce.graph import function
from allreduce.nn import losses
from tests.nn.common import blobs, classifier


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max(axis=1, keepdims=True))
    shares: np.ndarray = e / e.sum(axis=1, keepdims=True)
    return shares


class Reference:
    """tanh MLP, softmax cross-entropy, Adam."""

    def __init__(self, weights: list[np.ndarray], rate: float) -> None:
        self.p = [w.copy() for w in weights]
        self.m = [np.zeros_like(w) for w in weights]
        self.v = [np.zeros_like(w) for w in weights]
        self.rate, self.t = rate, 0

    def forward(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        hidden = np.tanh(x @ self.p[0] + self.p[1])
        return hidden, softmax(hidden @ self.p[2] + self.p[3])

    def step(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Take one step; returns the loss of each sample before it."""
        hidden, shares = self.forward(x)
        loss: np.ndarray = -np.log(shares[np.arange(len(y)), y])
        dz = (shares - np.eye(shares.shape[1])[y]) / len(y)
        dh = dz @ self.p[2].T * (1 - hidden**2)
        gradients = [x.T @ dh, dh.sum(axis=0), hidden.T @ dz, dz.sum(axis=0)]
        self.t += 1
        scale = self.rate * np.sqrt(1 - 0.999**self.t) / (1 - 0.9**self.t)
        for i, g in enumerate(gradients):
            self.m[i] = 0.9 * self.m[i] + 0.1 * g
            self.v[i] = 0.999 * self.v[i] + 0.001 * g * g
            self.p[i] = self.p[i] - scale * self.m[i] / (np.sqrt(self.v[i]) + 1e-7)
        return loss


def test_fit_is_the_arithmetic_written_out() -> None:
    x, y = blobs(50)
    x = x.astype(np.float64)
    model = classifier("float64")
    model.build((None, 6))
    reference = Reference(model.get_weights(), 0.01)
    history = model.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0)
    for epoch in range(3):
        per_sample = [reference.step(x[i : i + 16], y[i : i + 16]) for i in range(0, 50, 16)]
        # 50 = 3 * 16 + 2: the mean over samples, in which the small last batch counts for 2.
        wanted = np.concatenate(per_sample).mean()
        np.testing.assert_allclose(history.history["loss"][epoch], wanted, rtol=1e-12)
    for got, wanted in zip(model.get_weights(), reference.p, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-12)
    _, shares = reference.forward(x)
    np.testing.assert_allclose(model.predict(x, verbose=0), shares, rtol=1e-9)
    loss, accuracy = model.evaluate(x, y, verbose=0)
    np.testing.assert_allclose(loss, -np.log(shares[np.arange(50), y]).mean(), rtol=1e-9)
    assert accuracy == (shares.argmax(axis=1) == y).mean()


def test_fit_equals_a_hand_written_loop_to_the_bit() -> None:
    x, y = blobs(48)
    fitted = classifier()
    fitted.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    model = classifier()
    model.build((None, 6))
    optimizer = optim.Adam(0.01)

    @function
    def step(samples: np.ndarray, labels: np.ndarray) -> None:
        loss = losses.sparse_categorical_crossentropy(labels, model(samples, training=True))
        optimizer.minimize(loss, model.trainable_variables)

    for _ in range(2):
        for i in range(0, 48, 16):
            step(x[i : i + 16], y[i : i + 16])
    for got, wanted in zip(model.get_weights(), fitted.get_weights(), strict=True):
        assert np.array_equal(got, wanted)
