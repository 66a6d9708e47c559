"""The crash in a few lines: one thread traces a model, another calls a compiled function.

Usage: python repro/minimal.py    (no GPU needed)
Exit status: 0 both threads are right, 1 the fault shows.
"""

import sys
import threading

import torch


class Model(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inside.set()  # This thread is now in the middle of its trace ...
        called.wait(60)  # ... and stays there while the other one calls.
        return torch.relu(x)


inside, called = threading.Event(), threading.Event()
scale = torch.compile(lambda x: 2 * x, backend="eager")
scale(torch.ones(2))

tracing = threading.Thread(target=torch.fx.symbolic_trace, args=(Model(),))
tracing.start()
inside.wait(60)
error = ""
try:
    scale(torch.ones(2))
except RuntimeError as raised:
    error = str(raised).splitlines()[0]
called.set()
tracing.join()

print(f"torch {torch.__version__}")
if error:
    print(f"FAULT: a compiled function, called while another thread traces, raised: {error}")
    sys.exit(1)
print("OK: a compiled function works while another thread traces")
