"""The ops of a site served by the Triton kernels: chosen by name, checked at the start, the same numbers as plain PyTorch."""

from __future__ import annotations

import torch

import laneway as lw


def test_a_chain_is_served_by_triton():
    sites = [lw.HyperConnection(20, 4, site=i, iterations=5) for i in range(2)]
    with torch.no_grad():
        for site in sites:
            site.fn.normal_(std=0.1)
            site.base.normal_()
    x, gy, results = torch.randn(5, 4, 20), torch.randn(5, 4, 20), []
    for name in ("triton", "torch"):
        with lw.use_backend(name):
            leaf = x.clone().requires_grad_()
            chain = lw.StreamChain(leaf)
            for site in sites:
                chain.leave(torch.tanh(chain.enter(site)))
            y = chain.streams()
            results.append([y, *torch.autograd.grad(y, [leaf, *(p for site in sites for p in site.parameters())], gy)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * b.abs().max().item())
