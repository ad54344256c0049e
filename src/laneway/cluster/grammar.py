"""The short form of a topology, "8xH100_16nodes_4racks@NDR400/400GbE:4", read.

    topology  = part {"+" part} ["@" network {"/" network}]
    part      = COUNT "x" DEVICE {"_" COUNT member}       members innermost first: nodes, racks, then sites, clouds, …
    network   = [LINKS "x"] NETWORK [":" OVERSUBSCRIPTION]

Each count is for one group of the level around it: 16nodes_4racks are 16 nodes in each of 4 racks, 64 in all. Parts are ragged
clusters: 8xH100_3nodes+4xH100_1node are four nodes, one of them half as large; the last counts of the parts add up. Networks are
one for each level outside the node; a first one that is made for the inside of nodes (NVLink, xGMI, PCIe, loopback) is the
node's own, so to join nodes by NVLink both are given. LINKS are those of one member of the level; what is left out is as
`levels.make_levels` says.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from laneway.cluster.catalogue import DeviceEntry, device_entry, network
from laneway.cluster.levels import WORDS, Choice, Shape, even, make_levels
from laneway.cluster.topology import Topology
from laneway.core import InputError

__all__ = ["GRAMMAR", "parse_topology"]

GRAMMAR = (
    "COUNTxDEVICE[_COUNTnodes[_COUNTracks[_COUNTsites…]]][+…][@[LINKSx]NETWORK[:OVERSUBSCRIPTION][/…]], "
    "such as 8xH100_32nodes, 8xH100_16nodes_4racks@NDR400/400GbE:4 (16 nodes in each of 4 racks; one network for each level "
    "outside the node) or 8xH100_3nodes+4xH100_1node"
)
LARGEST = 1_000_000
LARGEST_OVERSUBSCRIPTION = 1000
LONGEST = 2000
_SHOWN = 120


class _Piece(NamedTuple):
    """A part of the text and where it starts in it."""

    whole: str
    start: int
    end: int

    @property
    def text(self) -> str:
        return self.whole[self.start : self.end]

    def split(self, mark: str) -> list[_Piece]:
        pieces, start = [], self.start
        for word in self.text.split(mark):
            pieces.append(_Piece(self.whole, start, start + len(word)))
            start += len(word) + 1
        return pieces

    def part(self, first: int, last: int) -> _Piece:
        return _Piece(self.whole, self.start + first, self.start + last)

    def wrong(self, why: str) -> InputError:
        shown = repr(_shorten(self.text)) if self.text else "here"
        return InputError("topology", _shorten(self.whole), GRAMMAR, f"at character {self.start + 1}, {shown}: {why}")


def _shorten(text: str) -> str:
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


def parse_topology(text: object) -> Topology:
    """A topology from its short form.

    Raises:
        InputError: anything else; it shows the grammar, and quotes the part that is wrong with its position.
    """
    if not isinstance(text, str):
        raise InputError("topology", text, GRAMMAR)
    _check_characters(text)
    body, *rest = _Piece(text, 0, len(text)).split("@")
    if len(rest) > 1:
        raise rest[1].wrong("a second '@'; networks are separated by '/'")
    entry, shapes = _shapes(body)
    choices = _choices(rest[0], shapes) if rest else []
    return Topology(entry.device, make_levels(entry, shapes, choices))


def _check_characters(text: str) -> None:
    whole = _Piece(text, 0, len(text))
    if not text:
        raise whole.wrong("nothing is written")
    if len(text) > LONGEST:
        raise whole.part(LONGEST, LONGEST + 1).wrong(f"longer than {LONGEST} characters; write it as a file")
    odd = re.search(r"[^A-Za-z0-9_+@/:.\-]", text)
    if odd:
        why = "no spaces" if odd[0].isspace() else "only letters and digits of ASCII, and _ + @ / : . -"
        raise whole.part(*odd.span()).wrong(why)


def _shapes(body: _Piece) -> tuple[DeviceEntry, list[Shape]]:
    pieces = body.split("+")
    read = [_part(piece) for piece in pieces]
    entry, first = read[0]
    for piece, (other, shapes) in zip(pieces[1:], read[1:], strict=True):
        if other.name != entry.name:
            raise piece.wrong(f"all devices must be of one type, here {entry.name}")
        if [shape.member for shape in shapes] != [shape.member for shape in first]:
            raise piece.wrong("all parts must have the same levels")
    if len(read) > 1 and len(first) == 1:
        raise pieces[1].wrong("say how many nodes each part has, such as 8xH100_1node+4xH100_1node")
    sizes = [[shape.size for shape in shapes] for _, shapes in read]
    if sum(math.prod(each) for each in sizes) > LARGEST:
        raise body.wrong(f"at most {LARGEST} devices in all")
    return entry, _merge(sizes, [shape.member for shape in first])


def _part(piece: _Piece) -> tuple[DeviceEntry, list[Shape]]:
    head, *members = piece.split("_")
    found = re.fullmatch(r"([0-9]+)x(.+)", head.text, re.IGNORECASE)
    if found is None:
        raise head.wrong("a count, an x and a device are expected, such as 8xH100")
    shapes = [Shape("device", _size(head.part(*found.span(1))))]
    name = head.part(*found.span(2))
    try:
        entry = device_entry(name.text)
    except InputError as error:
        raise name.wrong(f"unknown device; {error.hint or 'accepted: ' + error.accepted}") from None
    for member in members:
        shapes.append(_member(member, [shape.member for shape in shapes[1:]]))
    return entry, shapes


def _size(piece: _Piece) -> int:
    digits = piece.text.lstrip("0")
    if not digits:
        raise piece.wrong("at least 1")
    if len(digits) > len(str(LARGEST)) or int(digits) > LARGEST:
        raise piece.wrong(f"at most {LARGEST}")
    return int(digits)


def _member(piece: _Piece, before: list[str]) -> Shape:
    found = re.fullmatch(r"([0-9]+)([A-Za-z]+)", piece.text)
    if found is None:
        raise piece.wrong("a count and what it counts are expected, such as 32nodes")
    word, at = found[2].lower(), piece.part(*found.span(2))
    word = next((known for known in WORDS if word in (known, f"{known}s", "campuses" if known == "campus" else known)), word)
    if word not in WORDS:
        close = difflib.get_close_matches(word, WORDS, n=1)
        raise at.wrong(f"did you mean {close[0]}s?" if close else f"one of {', '.join(WORDS)}")
    if not before and word != "node":
        raise at.wrong("nodes come first")
    if word in before or (word == "rack" and len(before) > 1):
        raise at.wrong(f"each word once, from the inside outwards: nodes, racks, others; {', '.join(before)} came before")
    return Shape(word, _size(piece.part(*found.span(1))))


def _merge(parts: Sequence[Sequence[int]], members: Sequence[str]) -> list[Shape]:
    """Shapes of all parts together: their outermost sizes add up; where they differ inside, every group's count is listed."""
    counts: list[list[int]] = [[] for _ in members]
    for sizes in parts:
        groups = 1
        for index in reversed(range(len(sizes))):
            counts[index] += [sizes[index]] * groups
            groups *= sizes[index]
    counts[-1] = [sum(counts[-1])]
    return [Shape(member, *even(each)) for member, each in zip(members, counts, strict=True)]


def _choices(nets: _Piece, shapes: Sequence[Shape]) -> list[Choice | None]:
    pieces = nets.split("/")
    read = [_network(piece) for piece in pieces]
    inside = read[0].network.in_node
    choices: list[Choice | None] = [*read] if inside else [None, *read]
    if len(choices) > len(shapes):
        outside = len(shapes) - 1
        why = f"too many networks: levels outside the node: {outside}" if outside else "nothing is outside the one node"
        raise pieces[outside + inside].wrong(why)
    return choices


def _network(piece: _Piece) -> Choice:
    found = re.fullmatch(r"(?:([0-9]+)x)?([^:]*)(?::(.*))?", piece.text, re.IGNORECASE)
    if found is None or not found[2]:
        raise piece.wrong("a network is expected, such as NDR400 or 4xHDR200:2")
    name = piece.part(*found.span(2))
    try:
        kind = network(name.text)
    except InputError as error:
        raise name.wrong(f"no such network; {error.hint or 'accepted: ' + error.accepted}") from None
    links = _size(piece.part(*found.span(1))) if found[1] is not None else None
    times = _oversubscription(piece.part(*found.span(3))) if found[3] is not None else 1.0
    return Choice(kind, links, times)


def _oversubscription(piece: _Piece) -> float:
    if not re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,15})?", piece.text) or not 1 <= float(piece.text) <= LARGEST_OVERSUBSCRIPTION:
        raise piece.wrong(f"an oversubscription is a number from 1 to {LARGEST_OVERSUBSCRIPTION}")
    return float(piece.text)
