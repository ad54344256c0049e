"""The catalogue: every number has a source and the right order of magnitude, names are found in any case, others refused."""

from __future__ import annotations

import subprocess
import sys

import pytest

from laneway.cluster.catalogue import DEVICES, NETWORKS, device, match_device, network
from laneway.cluster.figure import Figure
from laneway.core import InputError


@pytest.mark.parametrize("entry", DEVICES.values(), ids=lambda entry: entry.name)
def test_each_number_of_a_device_has_unit_and_source(entry):
    figures = [*entry.flops.values(), entry.memory, entry.memory_bandwidth, entry.watts]
    assert all(isinstance(figure, Figure) and figure.value > 0 and len(figure.source) > 20 for figure in figures)
    assert {figure.unit for figure in entry.flops.values()} == {"FLOP/s"}
    assert (entry.memory.unit, entry.memory_bandwidth.unit, entry.watts.unit) == ("byte", "byte/s", "W")
    assert entry.device.source
    assert len(entry.wiring) > 20
    assert network(entry.node_network).in_node
    assert not network(entry.fabric).in_node


@pytest.mark.parametrize("each", NETWORKS.values(), ids=lambda each: each.name)
def test_each_number_of_a_network_has_unit_and_source(each):
    units = [figure.unit for figure in (each.line_rate, each.efficiency, each.latency, each.energy)]
    assert units == ["byte/s", "1", "s", "J/byte"]
    for figure in (each.line_rate, each.efficiency, each.latency, each.energy):
        assert figure.value > 0
        assert len(figure.source) > 8
        assert figure.source in each.source
    assert 0.5 < each.efficiency.value <= 1
    assert each.trusted == (each.name not in ("WAN", "Broadband"))


def test_relations_between_published_numbers():
    """What data sheets say of each other: more precision costs half, later generations are faster, energy falls with distance."""
    for name in ("A100", "H100", "H200", "B200", "MI300X"):
        flops = device(name).flops
        assert flops["bf16"] == pytest.approx(2 * flops["tf32"], rel=1e-3)
        if "fp8" in flops:
            assert flops["fp8"] == pytest.approx(2 * flops["bf16"], rel=1e-3)
    assert "fp8" not in device("A100").flops
    assert device("H200").flops == device("H100").flops
    assert device("A100-40GB").memory_bytes * 2 == device("A100").memory_bytes
    order = [network(name).bandwidth for name in ("NVLink5", "NVLink4", "xGMI", "NVLink3", "NDR400", "HDR200", "EDR100", "25GbE")]
    assert order == sorted(order, reverse=True)
    assert network("NDR400").bandwidth == pytest.approx(48.5e9)
    assert network("NVLink4").bandwidth == pytest.approx(370.8e9)
    far = [network(name) for name in ("NVLink4", "NDR400", "10GbE", "WAN")]
    assert [n.energy.value for n in far] == sorted(n.energy.value for n in far)
    assert [n.latency.value for n in far] == sorted(n.latency.value for n in far)


@pytest.mark.parametrize("name", [*DEVICES, *NETWORKS])
def test_names_are_found_in_any_case(name):
    find = device if name in DEVICES else network
    assert find(name.lower()) == find(name.upper()) == find(name)
    assert find(name).name == name


@pytest.mark.parametrize(
    ("find", "given", "close"),
    [
        (device, "H10", "H100"),
        (device, "H1000", "H100"),
        (device, "a100-40", "A100-40GB"),
        (device, "mi300", "MI300X"),
        (network, "NDR40", "NDR400"),
        (network, "NVLink", "NVLink4"),
        (network, "HDR 200", "HDR200"),
        (network, "400GigE", "400GbE"),
    ],
)
def test_an_unknown_name_is_refused_with_close_ones(find, given, close):
    with pytest.raises(InputError) as caught:
        find(given)
    assert repr(given) in str(caught.value)
    assert close in (caught.value.hint or "")


@pytest.mark.parametrize("given", ["", "zzzzzzzz", None, 8, "H100\n", b"H100", "x" * 10_000])
def test_what_is_like_nothing_is_refused_with_the_list(given):
    for find, known in ((device, "MI300X"), (network, "NDR400")):
        with pytest.raises(InputError) as caught:
            find(given)
        assert known in str(caught.value)


def test_ethernet_of_any_rate():
    assert network("50gbe").bandwidth == pytest.approx(50e9 / 8 * 0.9)
    assert not network("50GbE").per_device
    assert network("800GbE").per_device
    assert network("2.5GbE").name == "2.5GbE"
    for wrong in ("0GbE", "0.0GbE", "99999GbE", "-1GbE", "1e3GbE", "²5GbE"):
        with pytest.raises(InputError):
            network(wrong)
    with pytest.raises(InputError, match="above 0"):
        network("0GbE")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA-H100-80GB-HBM3", "H100"),
        ("h100", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("a100", "A100"),
        ("nvidia_a100-sxm4-40gb", "A100-40GB"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA B200", "B200"),
        ("AMD Instinct MI300X", "MI300X"),
        ("AMD_Instinct_MI300X_OAM", "MI300X"),
    ],
)
def test_what_drivers_and_schedulers_call_a_device(text, name):
    assert match_device(text) == device(name)


@pytest.mark.parametrize(
    "text",
    [
        "NVIDIA GH200 480GB",
        "NVIDIA GB200",
        "NVIDIA H100 PCIe",
        "NVIDIA H100 NVL",
        "Tesla V100-SXM2-32GB",
        "v100",
        "a1000",
        "h100_1g.10gb",
    ],
)
def test_another_device_keeps_its_name_and_says_that_it_is_a_stand_in(text):
    found = match_device(text)
    assert found.name == text.replace("_", " ")
    assert found.name not in DEVICES
    assert "not in the catalogue" in found.source
    assert "assumption" in found.source


def test_no_torch_is_imported():
    modules = ["catalogue", "grammar", "topology_files", "detect", "order", "identity", "short_form", "describe"]
    code = f"import sys; import {','.join(f'laneway.cluster.{m}' for m in modules)}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
