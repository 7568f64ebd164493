"""FedKL's Claims 1 to 4 and Equations 3 to 29 as closed forms, checked against autograd (see docs/fedkl-theory.md).

The paper writes products of single numbers. If a parameter is used more than once, they are sums over positions and
images; these sums are written out here. All computations are in float64.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gradveil.defences import build_defence
from gradveil.secret_stream import SecretStream

N, CLASSES, CHANNELS, SIDE = 4, 3, 3, 6
EPS = 1e-5


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(one, other):
    return torch.allclose(one, other, rtol=1e-9, atol=1e-12)


def test_claim_1_linear_regression():
    x, y, theta = draw(N, 5), draw(N, seed=1), draw(5, seed=2).requires_grad_()
    (x @ theta - y).square().mean().backward()
    with torch.no_grad():
        errors = x @ theta - y
        expected = 2 / N * sum(errors[n] * x[n] for n in range(N))  # Eq. 3
    assert close(theta.grad, expected)


class Perceptron:
    """The network of Claim 2 on one image, with its gradients by autograd."""

    def __init__(self):
        self.x, self.label = draw(7), 1
        self.theta, self.b1 = draw(6, 7, seed=1).requires_grad_(), draw(6, seed=2).requires_grad_()
        self.lamda, self.b2 = draw(CLASSES, 6, seed=3).requires_grad_(), draw(CLASSES, seed=4).requires_grad_()
        self.a = torch.relu(self.theta @ self.x + self.b1)
        z = self.lamda @ self.a + self.b2
        F.cross_entropy(z[None], torch.tensor([self.label])).backward()
        self.error = z.detach().softmax(0) - F.one_hot(torch.tensor(self.label), CLASSES)


def test_claim_2_two_layers():
    net = Perceptron()
    a, alive = net.a.detach(), (net.a > 0).double()
    assert close(net.lamda.grad, torch.outer(net.error, a))  # Eq. 6
    assert close(net.b2.grad, net.error)  # Eq. 7
    back = (net.error @ net.lamda.detach()) * alive
    assert close(net.theta.grad, torch.outer(back, net.x))  # Eq. 9
    assert close(net.b1.grad, back)  # Eq. 10


def test_claim_2_the_image_and_the_label_follow_from_the_gradients_alone():
    net = Perceptron()
    row = net.b1.grad.abs().argmax()
    assert close(net.theta.grad[row] / net.b1.grad[row], net.x)
    assert (net.b2.grad < 0).nonzero().item() == net.label


def test_equations_4_and_5():
    x = draw(9).requires_grad_()
    (relu,) = torch.autograd.grad(torch.relu(x).sum(), x)
    (sigmoid,) = torch.autograd.grad(torch.sigmoid(x).sum(), x)
    assert close(relu, torch.relu(x).sign())
    assert close(sigmoid, torch.sigmoid(x) * (1 - torch.sigmoid(x)))


class Network:
    """The network of Claims 3 and 4: convolution, BatchNorm (batch statistics), key-lock, ReLU, Linear, softmax."""

    def __init__(self, images=N, key_length=5, running=False):
        self.x, self.labels = draw(images, 2, SIDE, SIDE), torch.arange(images) % CLASSES
        self.theta, self.b1 = draw(CHANNELS, 2, 3, 3, seed=1).requires_grad_(), draw(CHANNELS, seed=2).requires_grad_()
        self.key = draw(key_length, seed=3).abs()
        self.omega, self.b_gamma = (
            draw(CHANNELS, key_length, seed=4).requires_grad_(),
            draw(CHANNELS, seed=5).requires_grad_(),
        )
        self.phi, self.b_beta = (
            draw(CHANNELS, key_length, seed=6).requires_grad_(),
            draw(CHANNELS, seed=7).requires_grad_(),
        )
        self.lamda = draw(CLASSES, CHANNELS * (SIDE - 2) ** 2, seed=8).requires_grad_()
        self.b4 = draw(CLASSES, seed=9).requires_grad_()
        self.u = F.conv2d(self.x, self.theta, self.b1)
        self.gamma, self.beta = self.omega @ self.key + self.b_gamma, self.phi @ self.key + self.b_beta
        self.mean = torch.zeros(1, CHANNELS, 1, 1).double() if running else self.u.mean((0, 2, 3), keepdim=True)
        self.var = (
            torch.ones(1, CHANNELS, 1, 1).double()
            if running
            else (self.u - self.mean).square().mean((0, 2, 3), keepdim=True)
        )
        self.normal = (self.u - self.mean) / (self.var + EPS).sqrt()
        self.s = self.gamma.view(-1, 1, 1) * self.normal + self.beta.view(-1, 1, 1)
        self.a = torch.relu(self.s)
        z = self.a.flatten(1) @ self.lamda.T + self.b4
        for kept in (self.u, self.normal, self.mean, self.var, self.gamma, self.beta, self.s):
            if kept.requires_grad:
                kept.retain_grad()
        F.cross_entropy(z, self.labels).backward()
        self.error = (z.detach().softmax(1) - F.one_hot(self.labels, CLASSES)) / images  # (N, classes)
        self.back = ((self.error @ self.lamda.detach()).view_as(self.s) * (self.a > 0)).detach()  # dL/ds


def test_the_forward_pass_is_torchs_batch_norm():
    net = Network()
    expected = F.batch_norm(net.u, None, None, net.gamma, net.beta, training=True, eps=EPS)
    assert close(net.s, expected)


def test_claim_3_convolution():
    net = Network()
    with torch.no_grad():
        u, slope = net.u, net.u.grad
        for n in range(N):
            for i, j, d in ((0, 0, 0), (3, 1, 2)):
                window = sum(
                    net.theta[d, c, h, w] * net.x[n, c, i + h, j + w]
                    for h in range(3)
                    for w in range(3)
                    for c in range(2)
                )
                assert close(u[n, d, i, j], window + net.b1[d])  # Eq. 12
        for d, c, h, w in ((0, 0, 0, 0), (2, 1, 2, 1)):
            terms = slope[:, d] * net.x[:, c, h : h + SIDE - 2, w : w + SIDE - 2]
            assert close(net.theta.grad[d, c, h, w], terms.sum())  # Eq. 14, summed
            assert not close(net.theta.grad[d, c, h, w], terms[0, 0, 0])
        assert torch.allclose(net.b1.grad, slope.sum((0, 2, 3)), atol=1e-12)  # Eq. 16


def test_claim_4_batch_norm():
    net = Network()
    with torch.no_grad():
        assert close(net.s.grad, net.back)
        assert close(net.gamma.grad, (net.back * net.normal).sum((0, 2, 3)))  # Eq. 21
        assert close(net.beta.grad, net.back.sum((0, 2, 3)))  # Eq. 22
        slope = net.back * net.gamma.view(-1, 1, 1)
        assert close(net.normal.grad, slope)  # Eqs. 23 and 29
        centred, root, count = net.u - net.mean, (net.var + EPS).sqrt(), N * (SIDE - 2) ** 2
        by_variance = -0.5 * (slope * centred).sum((0, 2, 3), keepdim=True) * root**-3  # Eq. 24
        by_mean = -(slope / root).sum((0, 2, 3), keepdim=True) + by_variance * -2 * centred.mean(
            (0, 2, 3), keepdim=True
        )
        by_u = slope / root + by_variance * 2 * centred / count + by_mean / count  # Eqs. 25 and 26
        assert close(net.var.grad, by_variance)
        assert close(net.mean.grad, by_mean)
        assert torch.allclose(net.u.grad, by_u, rtol=1e-8, atol=1e-12)


def test_the_key_lock():
    net = Network()
    assert close(net.omega.grad, torch.outer((net.back * net.normal.detach()).sum((0, 2, 3)), net.key))  # Eq. 27
    assert close(net.phi.grad, torch.outer(net.back.sum((0, 2, 3)), net.key))  # Eq. 28
    assert close(net.b_gamma.grad, net.gamma.grad)
    assert close(net.b_beta.grad, net.beta.grad)


def test_the_locks_gradient_holds_the_key_against_section_4_4():
    net = Network()
    assert close(net.omega.grad[0] / net.b_gamma.grad[0], net.key)


# --- quantities that can be computed without the key ------------------------------------------------------------------


def test_the_label_and_the_map_behind_the_lock_are_read_off_one_images_update():
    net = Network(images=1, running=True)
    assert (net.b4.grad < 0).nonzero().item() == net.labels.item()  # Eq. 7
    row = net.b4.grad.abs().argmax()
    assert close(net.lamda.grad[row] / net.b4.grad[row], net.a.detach().flatten())  # Eq. 6 over Eq. 7
    alive = (net.a > 0).flatten()
    assert alive.any()
    assert close(net.s.detach().flatten()[alive], net.a.detach().flatten()[alive])  # s is known where ReLU is active


def test_the_scales_follow_from_the_gradient_of_the_convolutions_bias():
    """With running statistics dL/db1 = gamma / sqrt(var + eps) sum dL/ds, and everything but gamma is known."""
    net = Network(images=1, running=True)
    row = net.b4.grad.abs().argmax()
    features = net.lamda.grad[row] / net.b4.grad[row]
    back = ((net.b4.grad @ net.lamda.detach()) * (features > 0)).view(CHANNELS, -1)
    gamma = net.b1.grad * (1 + EPS) ** 0.5 / back.sum(1)
    assert close(gamma, net.gamma.detach())


def unseen(network, images, label, names, *, searched=True):
    """Return in how many directions image and secret outputs can change without changing the shared gradient."""
    shared = {n: p.detach().double() for n, p in network.named_parameters() if "key_lock" not in n}
    network = network.double().eval()
    outputs = {name: network.get_submodule(name)().detach() for name in names}
    sizes = [images.numel(), *(value.numel() for value in outputs.values())]

    def gradient(point):
        pixels, *values = torch.split(point, sizes)
        handles = [
            network.get_submodule(name).register_forward_hook(lambda layer, args, out, value=value: value)
            for name, value in zip(outputs, values, strict=True)
        ]

        def loss(weights):
            answer = torch.func.functional_call(network, weights, (pixels.view_as(images),))
            return F.cross_entropy(answer, label)

        found = torch.func.grad(loss)(shared)
        for handle in handles:
            handle.remove()
        return torch.cat([slope.flatten() for slope in found.values()])

    point = torch.cat([images.flatten(), *outputs.values()])
    jacobian = torch.func.jacrev(gradient)(point)
    jacobian = jacobian if searched else jacobian[:, : images.numel()]
    values = torch.linalg.svdvals(jacobian / jacobian.norm(dim=0).clamp_min(1e-30))
    return int((values < 1e-9 * values[0]).sum()) + jacobian.shape[1] - len(values)


def small(bias=True):
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(1, 4, 3, padding=1, bias=bias), nn.Sigmoid(), nn.Conv2d(4, 4, 3, stride=2, padding=1, bias=bias),
        nn.Sigmoid(), nn.Flatten(), nn.Linear(64, 3),
    ]  # fmt: skip
    network = nn.Sequential(*layers)
    for parameter in network.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5)
    return network


@pytest.mark.parametrize(
    ("spec", "bias", "lost"),
    [
        ("fedkl:length=9", True, 0),
        ("fedkl:length=9,blocks=all", True, 0),
        ("fedkl:length=9,grid=2", True, 0),
        ("fedkl:length=9", False, 1),
    ],
)
def test_the_shared_gradient_determines_image_and_scales_together(spec, bias, lost):
    """The Jacobian has full rank: near the truth, no other image with other scales has the same update.

    Without a bias in the locked convolution one direction is lost: the brightness of the image (x and 1 / gamma).
    """
    network = build_defence(spec).on_model(small(bias), SecretStream(0))
    image = torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    names = [name.removesuffix(".key") for name, _ in network.named_buffers() if name.endswith("key_lock.key")]
    assert unseen(network, image, torch.tensor([1]), names, searched=False) == 0
    assert unseen(network, image, torch.tensor([1]), names) == lost
