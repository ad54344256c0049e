"""Rows and summaries for people: a rich table on a terminal, aligned columns without lines anywhere else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from laneway.bench.rows import Report, Row

COLUMNS = {
    "layer": ("tokens", "dim", "dtype", "threads", "variant", "wall_ms", "wall_ms_q1", "wall_ms_q3", "over_floor", "over_laneway",
              "peak_over_streams"),
    "layer_agreement": ("streams", "dtype", "compared", "error_y", "error_x", "error_fn", "error_base", "error_scale"),
    "hf": ("model", "dtype", "threads", "variant", "wall_ms", "wall_ms_q1", "wall_ms_q3", "over_accelerated", "connections_share",
           "peak_bytes"),
    "step": ("variant", "dtype", "threads", "allocator", "wall_ms", "wall_ms_q1", "wall_ms_q3", "over_residual", "connections_ms",
             "peak_bytes"),
    "memory": ("model", "dtype", "variant", "exact", "peak_ratio", "wall_over_none", "main_cpu_over_none",
               "process_cpu_over_none", "beta", "stall_share", "peak_error", "time_error_points", "moved", "recomputed",
               "checkpointed"),
    "memory_virtual": ("model", "dtype", "bandwidth_mb_s", "beta", "budget_share", "variant", "exact", "peak_ratio",
                       "predicted_overhead", "overhead", "moved", "recomputed", "checkpointed"),
    "memory_spike": ("model", "dtype", "beta", "length_factor", "demand_over_limit", "plain_survived", "managed_survived",
                     "exact", "gradient_error", "op_retries", "replays", "splits", "stall_seconds", "time_over_unlimited"),
    "memory_batch": ("model", "dtype", "beta", "limit_share", "variant", "batch", "batch_over_none", "tokens_per_s",
                     "at_most_tried"),
    "memory_solver": ("model", "dtype", "bandwidth_mb_s", "beta", "budget_share", "solver", "feasible", "predicted_peak_ratio",
                      "predicted_overhead", "moved", "recomputed", "checkpointed", "tried", "planning_seconds"),
    "quality": ("variant", "seed", "val_loss", "val_bits_per_byte", "peak_bytes", "gain_forward_max", "gain_backward_max"),
    "stability": ("condition", "variant", "lr", "runs", "diverged", "diverged_share_low", "diverged_share_high",
                  "gain_forward_median", "gain_forward_max", "gain_backward_max", "val_loss", "val_loss_minus_mhc",
                  "val_loss_minus_mhc_low", "val_loss_minus_mhc_high", "val_excess", "recovered", "recovery_steps_median"),
    "stability_verdicts": ("variant", "against", "verdict", "conditions", "better", "worse", "difference_mean",
                           "difference_best", "difference_worst", "diverged", "against_diverged"),
    "stability_curves": ("variant", "condition", "step", "finite_runs", "loss_median", "gain_forward_median", "gain_forward_max",
                         "gain_backward_median"),
    "stability_runs": ("variant", "condition", "seed", "diverged", "why", "nonfinite_steps", "val_loss", "gain_forward_max"),
    "symptoms": ("recipe", "seed", "turn", "knob", "found", "value", "limit", "completed", "loss", "val_loss", "peak_bytes",
                 "others"),
    "control_cost": ("variant", "tokens", "dim", "sites", "rounds", "cpu_ms", "hyper_ms", "overhead", "overhead_q1",
                     "overhead_q3", "target", "met"),
    "control_ranks": ("setting", "parallel", "ranks", "step_ms", "extra", "extra_q1", "extra_q3", "extra_cpu", "extra_cpu_q1",
                      "extra_cpu_q3", "collectives", "shared_bytes", "target", "met"),
    "quality_time": ("variant", "seed", "steps", "residual_steps", "step_time_over_residual", "val_loss", "residual_val_loss",
                     "val_loss_minus_residual"),
    "quality_context": ("variant", "seed", "from_position", "to_position", "loss", "perplexity"),
    "modalities": ("modality", "variant", "seed", "test_loss", "accuracy", "best_alone", "step_ms", "step_time_over_residual"),
    "precision": ("variant", "dtype", "dim", "threads", "rounds", "wall_ms", "wall_ms_q1", "wall_ms_q3", "fp32_over", "loss"),
    "convert": ("variant", "seed", "trainable", "lr", "val_loss_before", "val_loss", "step_ms", "collapse", "gain_backward"),
    "lora": ("case", "kind", "seed", "order", "caught_step", "measure", "layer", "shown_step", "shown_by", "val_loss",
             "val_loss_bound"),
    "policies": ("trace", "link_mb_s", "budget", "mode", "policy", "variant", "time_s", "stall_s", "overhead_percent",
                 "bytes_out", "bytes_in", "recomputed_s"),
    "soak": ("faults", "variant", "seed", "demand_over_limit", "completed", "interruptions", "by_spike", "by_nan", "by_kill",
             "by_disk", "by_corrupt", "by_other", "longest_steps", "longest_seconds", "lost_steps", "final_loss", "exact"),
    "soak_summary": ("faults", "figure", "variant", "over", "value", "low", "high", "seeds"),
    "planner": ("size", "devices", "micro_batch", "tp", "dp", "pp", "measured_ms", "predicted_ms", "predicted_low_ms",
                "predicted_high_ms", "error", "mfu", "memory_gb"),
    "planner_scores": ("file", "size", "rows", "mape", "spearman", "regret", "regret_worst"),
    "planner_transfer": ("fitted_on", "tested_on", "rows", "matmul_fraction", "memory_fraction", "interference", "mape",
                         "spearman"),
    "planner_published": ("name", "devices", "measured_s", "predicted_s", "predicted_low_s", "predicted_high_s", "error", "mfu",
                          "exposed_s"),
    "planner_sync": ("network", "scheme", "algorithm", "sync_ms", "sync_low_ms", "sync_high_ms", "over_chosen"),
    "planner_exposed": ("layout", "step_s", "exposed_s", "exposed_share", "bubble_s", "mfu", "cross_node_gb", "kwh_per_token",
                        "memory_gb"),
    "planner_bytes": ("scheme", "bytes_per_parameter", "saved"),
    "planner_sweep": ("op", "outer_gb_s", "message_bytes", "ring_ms", "tree_ms", "nvls_tree_ms", "two_level_ms", "hierarchy_ms",
                      "torus_ms", "native", "chosen", "chosen_ms", "native_kept"),
    "scheduling": ("experiment", "choice", "best_fixed", "steps", "changes", "seconds", "step_ms", "over_best_fixed",
                   "over_best_fixed_low", "over_best_fixed_high"),
    "dropping": ("variant", "seed", "steps", "val_loss", "val_loss_over_dense", "saved_share"),
    "dropping_bytes": ("scheme", "parameters", "sent_bytes", "saved_over_zero3"),
    "prediction": ("message_bytes", "variant", "function", "rounds", "measured_ms", "predicted_ms", "error"),
    "prediction_scores": ("message_bytes", "schemes", "mean_error", "worst_error", "fp32_regret", "worst_regret"),
    "collectives": ("op", "message_bytes", "variant", "rounds", "wall_ms", "wall_ms_q1", "wall_ms_q3", "floor_ms", "flat_over",
                    "flat_spread_over", "rack_over_vector", "host_over_vector", "error", "identical"),
    "collectives_ddp": ("variant", "parameters", "rounds", "wall_ms", "wall_ms_q1", "wall_ms_q3", "exposed_ms", "exposed_left",
                        "exposed_left_low", "exposed_left_high", "rack_over_gradient", "host_over_gradient", "gradient_error"),
    "lora_summary": ("group", "runs", "alarms", "earlier", "same", "later", "missed", "shown"),
}  # fmt: skip
LEFT = (
    "variant", "compared", "dtype", "modality", "model", "trace", "mode", "policy", "solver", "faults", "figure", "over",
    "file", "size", "fitted_on", "tested_on", "name", "network", "scheme", "algorithm", "layout", "op", "native", "chosen",
    "condition", "why", "recipe", "knob", "others", "setting", "parallel", "met",
)  # fmt: skip


def show(report: Report, console: Console | None = None) -> None:
    """Print every table, the summary's intervals and the notes."""
    console = console or Console()
    if not console.is_terminal:
        console = Console(file=console.file, width=max(console.width, 160))
    for name, rows in report.tables.items():
        _print(console, _table(name, rows, COLUMNS[name]))
    _print(console, _summary(report.summary))
    for note in report.notes:
        console.print(note, highlight=False)


def _print(console: Console, table: Table) -> None:
    if not console.is_terminal:
        table.box, table.title_justify = None, "left"
    console.print(table)


def _table(title: str, rows: Sequence[Row], columns: Sequence[str]) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="left" if column in LEFT else "right")
    for row in rows:
        table.add_row(*(_text(row[column]) for column in columns))
    return table


def _summary(summary: dict[str, Any]) -> Table:
    table = Table("condition", "figure", "value", "low", "high", title="summary")
    for condition, entries in summary.items():
        for name, figure in entries.items():
            parts = figure if isinstance(figure, dict) else {"value": figure, "low": None, "high": None}
            table.add_row(condition, name, *(_text(parts[part]) for part in ("value", "low", "high")))
    return table


def _text(value: Any) -> str:
    if value is None:
        return "–"
    if not isinstance(value, float):
        return str(value)
    return f"{value:.2e}" if value and abs(value) < 1e-3 else f"{value:.3f}" if abs(value) < 100 else f"{value:.0f}"
