"""What the counting allocator is asked in a process of its own; test_counting.py starts it and judges the answers.

Started as ``python counting_checks.py plain|caching``. It installs the allocator, then answers every line of standard input, a
JSON list of a function's name and its arguments, with one line of JSON.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import os
import random
import resource
import signal
import sys
import threading
import time
from pathlib import Path

import torch
from torch import nn

from laneway.core import InputError
from laneway.memory.counting import CountingAllocator
from laneway.memory.meter import CountingMeter, ProcessMeter, device_meter

PAGE = 4096


def block(nbytes):
    return torch.empty(nbytes, dtype=torch.uint8)


def raises(action):
    try:
        action()
    except torch.OutOfMemoryError as error:
        return str(error)
    return None


def sequence(seed):
    """Random allocations and releases; → what was counted and what this function counted itself."""
    draw, kept, own, most, count = random.Random(seed), [], 0, 0, 0
    base, before = a.live, a.allocations
    a.reset_peak()
    for _ in range(400):
        if kept and draw.random() < 0.45:
            own -= kept.pop(draw.randrange(len(kept))).numel()
        else:
            size = draw.choice([0, 1, 63, 64, 1000, PAGE, 65535, 65536, 65537, 300_000, draw.randrange(1 << 20)])
            kept.append(block(size))
            own, count = own + size, count + (size > 0)
            most = max(most, own)
        if a.live != base + own:
            return [a.live - base, a.peak - base, a.allocations - before], [own, most, count]
    return [a.live - base, a.peak - base, a.allocations - before], [own, most, count]


def by_hand():
    """Live and peak after each step of a short sequence of which every number can be told in advance."""
    base = a.live
    a.reset_peak()
    seen = []
    x = torch.zeros(1000)
    seen.append((a.live - base, a.peak - base))
    y = x.neg()
    seen.append((a.live - base, a.peak - base))
    del x
    seen.append((a.live - base, a.peak - base))
    a.reset_peak()
    y.untyped_storage().resize_(100_000)
    seen.append((a.live - base, a.peak - base))
    view = y[10:20]
    del y
    seen.append((a.live - base, a.peak - base))
    del view
    a.reset_peak()
    seen.append((a.live - base, a.peak - base))
    return seen


def over_the_limit():
    base, refused, facts = a.live, a.refused, {}
    a.limit(base + 1_000_000)
    a.reset_peak()
    try:
        first = block(600_000)
        facts["message"] = raises(lambda: block(400_001))
        facts["expected"] = [400_001, base + 600_000, base + 1_000_000]
        facts["to the byte"] = raises(lambda: block(400_000)) is None
        facts["live"] = a.live - base - first.numel()
        facts["peak is the limit"] = a.peak == base + 1_000_000
        facts["huge"] = raises(lambda: block(1 << 60)) is not None
        facts["refused"] = a.refused - refused
        a.limit(1)
        facts["below live"] = raises(lambda: block(1)) is not None
        a.limit(base + 1_000_000)
        del first
        facts["after a release"] = raises(lambda: block(1_000_000)) is None
        a.limit(None)
        facts["no limit"] = raises(lambda: block(2_000_000)) is None
    finally:
        a.limit(None)
    facts["left"] = a.live - base
    return facts


def without_memory():
    """More than the system has addresses for, no limit set."""
    base = a.live
    return raises(lambda: block(1 << 50)), a.live - base


def alignment():
    """Blocks of 64 KiB and more begin on pages; smaller ones never do and are aligned as torch expects."""
    big = [block(n) for n in [65536, 65537, 70_000, 1 << 20, 3_333_333] for _ in range(4)]
    small = [block(random.Random(i).randrange(1, 65536)) for i in range(500)] + [block(PAGE - 64) for _ in range(500)]
    return {
        "big": all(t.data_ptr() % PAGE == 0 for t in big),
        "mapped": all(a.mapped(t.data_ptr()) % PAGE == 0 and a.mapped(t.data_ptr()) >= t.numel() for t in big),
        "tight": all(a.mapped(t.data_ptr()) - t.numel() < (PAGE if not a.caching else t.numel() // 8 + PAGE) for t in big),
        "small": all(t.data_ptr() % 64 == 0 and t.data_ptr() % PAGE for t in small),
        "small mapped": sum(a.mapped(t.data_ptr()) for t in small),
        "older mapped": a.mapped(OLDER.data_ptr()) + a.mapped(0),
    }


def whole_pages(file):
    """Direct reading and writing of whole pages from a tensor's storage; → round trip exact, neighbours untouched."""
    size = 65536 + 17
    neighbours = [block(size).fill_(7) for _ in range(32)]
    tensor, pages = neighbours.pop(16), (size + PAGE - 1) // PAGE * PAGE
    if a.mapped(tensor.data_ptr()) < pages:
        return {"mapped": a.mapped(tensor.data_ptr())}
    tensor.copy_(torch.arange(size) % 251)
    before = tensor.clone()
    view = (ctypes.c_char * pages).from_address(tensor.data_ptr())
    try:
        handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    except OSError as error:
        return {"skip": f"no direct access to files here: {error}"}
    try:
        written = os.pwritev(handle, [view], 0)
        tensor.fill_(9)
        read = os.preadv(handle, [view], 0)
    finally:
        os.close(handle)
    untouched = all(bool((t == 7).all()) for t in neighbours)
    return {"bytes": [written, read], "pages": pages, "exact": torch.equal(tensor, before), "untouched": untouched}


def cache():
    """Reuse by size class, and the bytes that the cache holds."""
    a.empty_cache()
    facts = {"emptied": a.cached}
    t = block(1_000_000).fill_(1)
    address, mapped = t.data_ptr(), a.mapped(t.data_ptr())
    del t
    facts["cached"], facts["mapped"] = a.cached, mapped
    t = block(990_000)
    facts["same block"], facts["taken"] = t.data_ptr() == address, a.cached
    facts["counted"] = a.mapped(t.data_ptr()) == mapped
    del t
    resident = ProcessMeter()
    many = [block(4 << 20).fill_(1) for _ in range(16)]
    full = resident.live()
    del many
    kept = resident.live()
    a.empty_cache()
    facts["given back"] = [full - kept, kept - resident.live()]
    facts["after"] = a.cached
    t = block(1_000_000).fill_(3)
    facts["usable"] = int(t.sum())
    return facts


def cache_gives_way():
    """Address space for 128 MiB more, of which the cache holds 96: → whether 112 MiB are still to be had, and what is cached."""
    a.empty_cache()
    before = resource.getrlimit(resource.RLIMIT_AS)
    space = int(Path("/proc/self/statm").read_text().split()[0]) * PAGE
    resource.setrlimit(resource.RLIMIT_AS, (space + (128 << 20), before[1]))
    try:
        t = block(96 << 20)
        del t
        cached = a.cached
        refusal = raises(lambda: block(112 << 20))
        a.empty_cache()
        too_much = raises(lambda: block(160 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    return cached, refusal, too_much


def resident_memory():
    """How far the process's resident bytes fall when 64 MiB in sixteen blocks are freed."""
    meter = ProcessMeter()
    start = meter.live()
    many = [block(4 << 20).fill_(1) for _ in range(16)]
    full = meter.live()
    del many
    return {"rise": full - start, "fall": full - meter.live(), "cached": a.cached}


def threads(count, rounds):
    """Allocations of all sizes in several threads under a limit that they reach, many freed by another thread than made them."""
    base, refused, wrong, shared, limit = a.live, a.refused, [], [[] for _ in range(count)], 4 << 20
    a.limit(base + limit)
    a.reset_peak()

    def work(index):
        draw = random.Random(index)
        for _ in range(rounds):
            pile = shared[draw.randrange(count)]
            try:
                t = block(draw.choice([8, 500, 40_000, 65536, 200_000])).fill_(index)
            except torch.OutOfMemoryError:
                pile.clear()
                continue
            if int(t[-1]) != index or int(t[0]) != index:
                wrong.append(index)
            pile.append(t)

    running = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    peak = a.peak - base
    shared.clear()
    a.limit(None)
    return {"wrong": wrong, "left": a.live - base, "peak": peak, "limit": limit, "refused": a.refused - refused}


def forks(times):
    """Children forked while another thread is inside the allocator, most of the time with a lock of it held.

    Each child must be able to allocate too. → their exit codes.
    """
    stop, codes, events = threading.Event(), [], 100_000
    a.record(events)
    for _ in range(events // 2):
        block(100)
    seconds, nbytes = (ctypes.c_double * events)(), (ctypes.c_int64 * events)()

    def read_the_log():
        while not stop.is_set():
            a._functions["events"](seconds, nbytes, events)

    thread = threading.Thread(target=read_the_log)
    thread.start()
    try:
        for _ in range(times):
            child = os.fork()
            if not child:
                signal.alarm(10)
                for size in (10, 65536, 100_000):
                    block(size)
                os._exit(0)
            codes.append(os.waitpid(child, 0)[1])
            if codes[-1]:
                break
    finally:
        stop.set()
        thread.join()
        a.record(None)
    return codes


def log():
    """Events of a known sequence, in a log with room and in one without."""
    a.record(100)
    start = time.monotonic()
    t = block(1000)
    u = block(100_000)
    del t
    end = time.monotonic()
    roomy, recorded = a.events(), a.recorded
    a.record(2)
    del u
    block(5)
    narrow, narrow_recorded = a.events(), a.recorded
    a.record(None)
    block(5)
    return {
        "roomy": [e.nbytes for e in roomy],
        "recorded": recorded,
        "times": [start, *(e.seconds for e in roomy), end],
        "narrow": [e.nbytes for e in narrow],
        "narrow recorded": narrow_recorded,
        "ended": [a.events(), a.recorded],
    }


def model():
    torch.manual_seed(5)
    return nn.Sequential(nn.Embedding(50, 64), nn.TransformerEncoderLayer(64, 4, 256, batch_first=True), nn.Linear(64, 50))


def trained(steps=3):
    """A few training steps; → a hash of every parameter's bits."""
    net = model()
    for step in range(steps):
        torch.manual_seed(step)
        tokens = torch.randint(50, (4, 33))
        loss = nn.functional.cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.sub_(parameter.grad, alpha=0.1)
                parameter.grad = None
    digest = hashlib.sha256()
    for parameter in net.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def failing_everywhere():
    """A forward and backward that fails at its first, second, … allocation; a clean one follows each failure."""
    net = model()
    tokens = torch.randint(50, (2, 16))

    def step():
        net.zero_grad(set_to_none=True)
        torch.manual_seed(0)
        loss = net(tokens).square().mean()
        loss.backward()
        return [loss.detach(), *(p.grad for p in net.parameters())]

    right = [t.clone() for t in step()]
    net.zero_grad(set_to_none=True)
    base, before = a.live, a.allocations
    step()
    count = a.allocations - before
    net.zero_grad(set_to_none=True)
    facts = {"allocations": count, "raised": 0, "right after it": 0, "left": a.live - base}
    for k in range(1, count + 1):
        a.fail_at(k)
        facts["raised"] += raises(step) is not None
        facts["right after it"] += all(torch.equal(x, y) for x, y in zip(step(), right, strict=True))
        net.zero_grad(set_to_none=True)
        facts["left"] = max(facts["left"], a.live - base)
    a.fail_at(count + 1)
    facts["not reached"], facts["fails in"] = raises(step) is None, a.fails_in
    a.fail_at(0)
    facts["taken back"] = a.fails_in
    return facts


def failing_once():
    """Only blocks of at least 1000 bytes count, the failure comes once, and the message says so."""
    a.fail_at(2, min_bytes=1000)
    results = [raises(lambda n=n: block(n)) for n in (10, 1000, 999, 5000, 5000)]
    return [text is not None for text in results], results[3]


def profiled():
    """Bytes that torch's profiler saw."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        kept = block(123_456)
    return sum(event.self_cpu_memory_usage for event in profile.events()), kept.numel()


def lazily_cloned():
    """A copy-on-write clone: nothing more until one of the two is written."""
    base = a.live
    t = torch.ones(100_000)
    clone = torch._lazy_clone(t)
    shared = a.live - base
    clone.add_(1)
    return [shared, a.live - base, float(t.sum()), float(clone.sum())]


def raw(path):
    """The allocator's C++ interface, through a library that calls it; see the C++ in test_counting.py."""
    library = ctypes.CDLL(path)
    base = a.live
    library.raw.restype = ctypes.c_int64
    return {"returned": library.raw(ctypes.c_size_t(100)) + library.raw(ctypes.c_size_t(100_000)), "left": a.live - base}


def installing():
    """A second call gives the first one's allocator; the other setting is refused."""
    try:
        CountingAllocator.install(caching=not a.caching)
    except InputError as error:
        refusal = str(error)
    else:
        refusal = None
    same = CountingAllocator.install(caching=a.caching) is a and CountingAllocator.installed() is a
    return same, refusal


def bad_input():
    """Messages of calls with bad input."""
    messages = []
    for call in (lambda: a.limit(0), lambda: a.fail_at(-1), lambda: a.fail_at(1, -5), lambda: a.record(0), lambda: a.limit(2.5)):
        try:
            call()
        except InputError as error:
            messages.append(str(error))
    a.limit(1 << 80)
    a.limit(None)
    return messages, a.limited_to


def older_tensors():
    """A tensor that is older than the allocator is freed by its own."""
    global OLDER
    base = a.live
    OLDER = OLDER * 2
    grown = a.live - base
    return grown, OLDER.numel() * 4, float(OLDER.sum())


def meter():
    """The CPU's meter here."""
    found = device_meter(torch.device("cpu"))
    facts = {"counting": isinstance(found, CountingMeter)}
    found.reset_peak()
    base = found.live()
    t = block(1_000_000)
    facts["live"] = found.live() - base
    del t
    facts["peak"], facts["live after"] = found.peak() - base, found.live() - base
    found.reset_peak()
    facts["reset"] = found.peak() - base
    a.limit(1 << 25)
    facts["capacity"] = found.capacity()
    a.limit(None)
    facts["unlimited"] = found.capacity() > 1 << 25
    return facts


if __name__ == "__main__":
    OLDER = torch.ones(100_000)
    torch.set_num_threads(1)
    assert mmap.PAGESIZE == PAGE
    a = CountingAllocator.install(caching=sys.argv[1] == "caching")
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(globals()[name](*arguments)), flush=True)
