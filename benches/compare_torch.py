#!/usr/bin/env python3
"""Compares our training samples/s with PyTorch's on the DLRM-Kaggle shape of `torch_dlrm.py`.

We measure two trainers: the sequential one, and the full one, which reads, encodes and casts on another
thread. All sides stay loaded and run one window each per pair; the order is reversed after every pair. Each
pair gives one ratio to PyTorch per trainer, and the median is reported. PyTorch's tuning is chosen as in
`torch_dlrm.py`: every tuning runs in trial windows in turn, and the two fastest run in every pair. The one
with the higher median is the baseline.

    python3 benches/compare_torch.py [--optimizer sgd,adagrad] [--batch 128,2048]
        [--skew uniform,criteo] [--pairs 9] [--seconds 1] [--threads 2] [--json]

Needs torch (pip), and builds our side with cargo.
"""

import argparse
import datetime
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

try:
    import torch
except ImportError:
    sys.exit("compare_torch: torch is not installed (pip install torch); nothing to compare with")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import torch_dlrm

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Seconds between windows, so that a side's spinning threads stop before the other side's window.
REST = 0.3


def build():
    """Builds the bench `train_dlrm` and returns its path."""
    command = ["cargo", "bench", "--bench", "train_dlrm", "--no-run", "--message-format", "json"]
    out = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    messages = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    return next(
        m["executable"] for m in messages
        if m.get("executable") and m.get("target", {}).get("name") == "train_dlrm"
    )


class Ours:
    """One of our trainers: `train_dlrm --paced`, which runs a window on request."""

    def __init__(self, program, setting, name, threads):
        self.name, self.rates = name, []
        paced = setting + ",full" if name == "full" else setting
        command = [program, "--paced", paced, "--threads", str(threads)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def window(self, seconds):
        self.process.stdin.write(f"{int(seconds * 1000)}\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"train_dlrm ended with {self.process.wait()}")
        self.rates.append(float(line))

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def trainers(optimizer, data, args):
    """PyTorch's two fastest tunings."""
    found = []
    for rows in (torch_dlrm.Tables, torch_dlrm.Merged):
        for form in ("plain", "foreach", "fused"):
            try:
                trainer = torch_dlrm.Trainer(rows, form, optimizer, data)
                trainer.window(args.seconds / 2)
            except (RuntimeError, TypeError, ValueError, NotImplementedError):
                continue  # this version of torch does not have the form
            trainer.rates.clear()
            found.append(trainer)
    for _ in range(args.trial_windows):
        for trainer in found:
            trainer.window(args.seconds / 2)
    best = sorted(found, key=torch_dlrm.Trainer.median)[-2:]
    for trainer in best:
        trainer.rates.clear()
    return best


def measure(program, optimizer, batch, skew, args):
    peers = trainers(optimizer, torch_dlrm.batches(batch, skew), args)
    setting = f"{optimizer},{batch},{skew}"
    ours = [Ours(program, setting, "sequential", args.threads), Ours(program, setting, "full", args.threads)]
    for side in ours:
        side.window(args.seconds)
        side.rates.clear()
    for pair in range(args.pairs):
        for side in [*ours, *peers] if pair % 2 == 0 else [*peers, *reversed(ours)]:
            time.sleep(REST)
            side.window(args.seconds)
    for side in ours:
        side.close()
    peer = max(peers, key=torch_dlrm.Trainer.median)
    return [compare(side, peer, optimizer, batch, skew) for side in ours]


def compare(side, peer, optimizer, batch, skew):
    ratios = sorted(mine / theirs for mine, theirs in zip(side.rates, peer.rates))
    return {
        "trainer": side.name, "optimizer": optimizer, "batch": batch, "skew": skew, "pairs": len(ratios),
        "ratio": round(statistics.median(ratios), 3), "least": round(ratios[0], 3), "most": round(ratios[-1], 3),
        "best": round(max(side.rates) / max(peer.rates), 3), "ours": round(statistics.median(side.rates)),
        "torch": round(peer.median()), "tuning": peer.name,
        "load": round(os.getloadavg()[0], 2),
    }


def main():
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("--optimizer", default="sgd,adagrad")
    flags.add_argument("--batch", default="128,2048")
    flags.add_argument("--skew", default="uniform", help="uniform, criteo")
    flags.add_argument("--threads", type=int, default=2)
    flags.add_argument("--seconds", type=float, default=1.0, help="seconds per window")
    flags.add_argument("--pairs", type=int, default=9)
    flags.add_argument("--trial-windows", type=int, default=3, help="trial windows of each tuning of PyTorch")
    flags.add_argument("--program", help="path of train_dlrm, if it is built already")
    flags.add_argument("--json", action="store_true", help="one JSON object on one line, at the end")
    args = flags.parse_args()
    torch.set_num_threads(args.threads)
    torch.sparse.check_sparse_tensor_invariants.disable()
    program = args.program or build()
    today = datetime.date.today().isoformat()
    print(f"samples/s, ours against torch {torch.__version__}, {args.threads} threads each, {today}, "
          f"load {os.getloadavg()[0]:.2f}")
    print(f"{'setting':<36} {'ratio':>6} {'best':>6} {'least-most':>13} {'ours':>8} {'torch':>8}  tuning")
    results = []
    for optimizer in args.optimizer.split(","):
        for batch in map(int, args.batch.split(",")):
            for skew in args.skew.split(","):
                for r in measure(program, optimizer, batch, skew, args):
                    results.append(r)
                    name = f"{optimizer} batch {batch} {skew} {r['trainer']}"
                    spread = f"{r['least']}-{r['most']}"
                    print(f"{name:<36} {r['ratio']:>6} {r['best']:>6} {spread:>13} {r['ours']:>8} {r['torch']:>8}"
                          f"  {r['tuning']}", flush=True)
    print(f"ratio: median of the pairs; best: fastest window against fastest; load {os.getloadavg()[0]:.2f}")
    if args.json:
        print(json.dumps({"bench": "compare_torch", "torch": torch.__version__, "threads": args.threads,
                          "date": today, "results": results}))


if __name__ == "__main__":
    main()
