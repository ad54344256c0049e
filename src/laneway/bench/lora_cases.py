"""Fine-tunes for ``laneway bench lora``: healthy ones, and ones with a mistake that people make.

The mistakes of ``HELD_OUT`` were written down before the limits of the check were set and run only afterwards.
"""

from __future__ import annotations

from laneway.bench import lora_mistakes as mistakes
from laneway.bench.lora_run import Case

MAPS = ("site_attention.fn", "site_ffn.fn")

HEALTHY = [
    Case("default", "all linear layers"),
    Case("resumed", "goes on from a trained adapter", resumes="default"),
    Case("maps", "attention and the maps of the sites", changes={"targets": ("attention.qkv", *MAPS)}),
    Case("dropout", "dropout of the adapter's input", changes={"dropout": 0.1}),
    Case("qkv", "one layer a block", changes={"targets": ("attention.qkv",)}),
    Case("out", "attention's output alone", changes={"targets": ("attention.out",)}),
    Case("out-resumed", "goes on from that", resumes="out", changes={"targets": ("attention.out",)}),
    Case("resumed-blind", "as resumed, without a record", resumes="default", record=False),
    Case("rank-2", "a small rank", changes={"rank": 2, "alpha": 4.0}),
    Case("rank-32", "a large rank", changes={"rank": 32, "alpha": 64.0}),
    Case("ffn", "the feed-forward layers alone", changes={"targets": ("ffn.gate_up", "ffn.out")}),
    Case("alpha-64", "four times the scaling", changes={"alpha": 64.0}),
    Case("lr-x3", "three times the learning rate", changes={"lr": 6e-3}),
    Case("merge-unmerge", "merged for an export and unmerged", step=mistakes.at(mistakes.MIDDLE, mistakes.merge_and_back)),
    Case("peft", "PEFT's adapters", add=mistakes.with_peft(["qkv", "gate_up"])),
]

BROKEN = [
    Case("scaling-x100", "α a hundred times too large", changes={"alpha": 1.6e3}),
    Case("scaling-x1000", "α a thousand times too large", changes={"alpha": 1.6e4}),
    Case("target-head", "the head too, which is tied to the embedding", add=mistakes.on_head),
    Case("target-embedding", "the embedding too (PEFT)", add=mistakes.with_peft(["qkv", "embedding"]), like="qkv"),
    Case("target-readout", "the read-out's projection too (PEFT)", add=mistakes.with_peft(["qkv"], ["readout.fn"]), like="qkv"),
    Case("b-not-zero", "B drawn at random", added=mistakes.random_b),
    Case(
        "fp16-loss-scale",
        "fp16 factors under a loss scale nobody divides by",
        added=mistakes.half_factors,
        loss=lambda x: x * 2.0**20,
    ),
    Case("maps-bf16", "maps cast to bf16", base=mistakes.narrow_maps),
    Case("maps-rounded", "maps stored in bf16, loaded as fp32", base=mistakes.round_maps),
    Case("comb-transposed", "in and out of the mix exchanged at load", base=mistakes.transpose_comb),
    Case(
        "map-eval-only",
        "a map's adapter works in eval mode only",
        changes={"targets": ("attention.qkv", *MAPS)},
        like="maps",
        added=mistakes.eval_only,
        step=mistakes.at(mistakes.MIDDLE, mistakes.nudge_maps),
    ),
    Case(
        "load-rank-slice",
        "the wrong slice of a larger rank",
        resumes="default",
        like="resumed",
        changes={"rank": 4},
        load=mistakes.sliced,
    ),
    Case("load-layer-shift", "adapters of the layer before", resumes="default", like="resumed", load=mistakes.shifted),
    Case(
        "load-swapped",
        "A and B exchanged",
        resumes="out",
        like="out-resumed",
        changes={"targets": ("attention.out",)},
        load=mistakes.swapped,
    ),
    Case("double-merge", "merged by hand, and still active", step=mistakes.at(mistakes.MIDDLE, mistakes.add_twice)),
    Case("unmerge-unmerged", "unmerged without a merge", step=mistakes.at(mistakes.MIDDLE, mistakes.subtract)),
    Case(
        "dropout-in-eval", "dropout active in eval mode", like="dropout", changes={"dropout": 0.1}, added=mistakes.always_dropout
    ),
    Case("base-trained", "the base trains too", added=mistakes.thaw),
    Case("lr-x1000", "learning rate a thousand times too large", changes={"lr": 2.0}),
    Case("nan-batch", "a batch without a single target", batch=mistakes.ignore_all),
    Case("adapter-frozen", "the optimizer does not know the adapters", optimizer=mistakes.unused),
    Case("adapter-shared", "all blocks share one adapter", added=mistakes.share_factors),
    Case("off-manifold", "H_res multiplied by 1.05", base=mistakes.off_manifold),
    Case("one-iteration", "one Sinkhorn iteration", base=mistakes.one_iteration),
    Case("scale-flipped", "sign of the maps' scale flipped", base=mistakes.flip_scale),
    Case("head-untied", "head and embedding untied", added=mistakes.untie),
]

HELD_OUT = [
    Case(
        "load-without-alpha",
        "α not in the file",
        resumes="default",
        like="resumed",
        changes={"alpha": 64.0},
        load=mistakes.without_alpha,
    ),
    Case(
        "load-layer-shift-blind",
        "as load-layer-shift, no record",
        resumes="default",
        record=False,
        like="resumed",
        load=mistakes.shifted,
    ),
    Case(
        "load-rank-slice-blind",
        "as load-rank-slice, no record",
        resumes="default",
        record=False,
        like="resumed",
        changes={"rank": 4},
        load=mistakes.sliced,
    ),
    Case(
        "load-half-blind",
        "half of the file's names don't fit, no record",
        resumes="default",
        record=False,
        like="resumed",
        load=mistakes.half_of_it,
    ),
    Case("not-causal", "attention without its mask", base=mistakes.not_causal),
    Case("other-rotary", "rotary angles of another base", base=mistakes.other_rotary),
    Case("other-norm-eps", "another epsilon in the norms", base=mistakes.other_eps),
    Case("sites-swapped", "the two sites of a block exchanged", base=mistakes.swap_sites),
    Case("readout-shuffled", "read-out weights in another order", base=mistakes.shuffle_readout),
    Case("base-bf16", "the base cast to bf16", base=mistakes.narrow_base),
    Case("labels-shifted", "targets one token further on", batch=lambda step, x, y: (x, y.roll(-1, 1))),
    Case("wrong-vocabulary", "tokens of another vocabulary", batch=lambda step, x, y: ((x + 1) % 256, (y + 1) % 256)),
    Case("uphill", "the loss is maximised", loss=lambda loss: -loss),
    Case("decay-x1000", "weight decay of 100", changes={"decay": 100.0}),
    Case("lr-x30", "learning rate thirty times too large", changes={"lr": 6e-2}),
    Case("lr-tiny", "learning rate a thousand times too small", changes={"lr": 2e-6}),
    Case("a-zero", "A zero as well as B", added=mistakes.zero_a),
    Case(
        "optimizer-stale",
        "adapters made anew, the optimizer has the old ones",
        step=mistakes.at(mistakes.MIDDLE, mistakes.renewed),
    ),
    Case("gradients-kept", "gradients never cleared", zero=False),
]
