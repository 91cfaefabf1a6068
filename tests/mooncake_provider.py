"""A process that gives memory to a Mooncake Store: `python mooncake_provider.py MASTER_PORT SEGMENT_MIB`."""

from __future__ import annotations

import signal
import sys

from mooncake.store import MooncakeDistributedStore

if __name__ == "__main__":
    store = MooncakeDistributedStore()
    code = store.setup(
        "127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]) << 20, 16 << 20, "tcp", "", f"127.0.0.1:{sys.argv[1]}"
    )
    print("provider:", code, flush=True)
    signal.pause()
