"""The doctor's words: a rich table on a terminal, plain lines elsewhere."""

from __future__ import annotations

from typing import Any, TextIO

from laneway.doctor.finding import Finding

GIB = 2.0**30


def machine_lines(machine: dict[str, Any]) -> list[tuple[str, str]]:
    """Label and text of everything known about the machine."""
    torch, cpu, memory, disk = machine["torch"], machine["cpu"], machine["memory"], machine["disk"]
    limit = f", limited to {memory['limit_bytes'] / GIB:.1f} GiB" if memory["limit_bytes"] else ""
    swap = f"; swap {memory['swap_used_bytes'] / GIB:.1f} of {memory['swap_total_bytes'] / GIB:.1f} GiB used"
    sets = " ".join(cpu["instruction_sets"]) or "none of those we ask for"
    lines = [
        ("laneway", machine["laneway"]),
        ("python", f"{machine['python']['version']} ({machine['python']['implementation']}) on {machine['system']}"),
        ("torch", f"{torch['version']}, built for {torch['build']}, {torch['cpu_capability']}, {torch['threads']} threads"),
        ("processor", f"{cpu['model']}: {cpu['cores']} cores, {cpu['logical_cores']} logical, {cpu['usable_cores']} usable"),
        ("instructions", sets),
        ("memory", f"{memory['available_bytes'] / GIB:.1f} of {memory['total_bytes'] / GIB:.1f} GiB available{limit}{swap}"),
        *[("device", f"{d['device']} {d['name']}, {d['total_bytes'] / GIB:.1f} GiB") for d in machine["devices"]],
        ("disk", f"{disk['free_bytes'] / GIB:.1f} of {disk['total_bytes'] / GIB:.1f} GiB free in {disk['folder']}"),
    ]
    if not machine["devices"]:
        lines.insert(6, ("device", "no accelerator"))
    if machine.get("paging"):
        lines.insert(6, ("paging", _paging(machine["paging"])))
    if machine.get("memory_settings"):
        lines.append(("memory manager", " ".join(f"{k}={v}" for k, v in machine["memory_settings"].items())))
    if "error" in disk:
        lines.append(("disk", disk["error"]))
    lines += [(rate["what"], _rate(rate)) for rate in machine["bandwidth"]]
    lines += [(name, version or "absent") for name, version in machine["compilers"].items()]
    backends = [name for name, there in machine["distributed"].items() if there]
    lines.append(("distributed", " ".join(backends) or "not built in"))
    lines.append(("allocator", " ".join(f"{k}={v}" for k, v in machine["allocator"].items()) or "no tuning variables set"))
    for extra, packages in machine["packages"].items():
        lines.append((f"extra {extra}", ", ".join(f"{name} {version or 'absent'}" for name, version in packages.items())))
    return lines


def _paging(paging: dict[str, Any]) -> str:
    swap = f"swap {paging['pages_in_per_s']:,.0f} pages/s in, {paging['pages_out_per_s']:,.0f} out"
    return f"{100 * paging['system_share']:.0f} % system time; {swap}; {paging['major_faults_per_s']:,.0f} major faults/s"


def _rate(rate: dict[str, Any]) -> str:
    spread = f" ({rate['low'] / GIB:.2f} to {rate['high'] / GIB:.2f})" if rate["high"] > rate["low"] else ""
    note = f", {rate['note']}" if rate["note"] else ""
    return f"{rate['bytes_per_s'] / GIB:.2f} GiB/s{spread}, {rate['payload_bytes'] / 2**20:.0f} MiB{note}"


def show(title: str, lines: list[tuple[str, str]], findings: list[Finding], healthy: str, out: TextIO) -> None:
    """Print what is known and what was found; ``healthy`` is said where nothing was."""
    if out.isatty():
        _show_rich(title, lines, findings, healthy, out)
        return
    for label, text in lines:
        print(f"{label}: {text}", file=out)
    for finding in findings:
        print(f"finding: {finding.rule}: {finding.finding}", file=out)
        print(f"  evidence: {finding.evidence}", file=out)
        for knob in finding.knobs:
            print(f"  knob: {knob.name}: {knob.words}", file=out)
    if not findings:
        print(healthy, file=out)


def _show_rich(title: str, lines: list[tuple[str, str]], findings: list[Finding], healthy: str, out: TextIO) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=out)
    if lines:
        table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        for label, text in lines:
            table.add_row(Text(label), Text(text))
        console.print(table)
        console.print()
    if not findings:
        console.print(Text(healthy, style="green"))
        return
    table = Table(title=f"{len(findings)} finding{'s' if len(findings) > 1 else ''}", title_justify="left", show_lines=True)
    for heading in ("finding", "evidence", "knob"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        knobs = Text("\n").join(Text.assemble((knob.name, "bold"), f": {knob.words}") for knob in finding.knobs)
        table.add_row(Text.assemble((finding.finding, "yellow"), f"\n{finding.rule}"), Text(finding.evidence), knobs)
    console.print(table)
