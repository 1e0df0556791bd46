"""The last resort: fakeredis behind a port. Run as a script: fake_redis.py FOLDER PORT."""

from __future__ import annotations

import sys

from fakeredis import TcpFakeServer

if __name__ == "__main__":
    TcpFakeServer(("127.0.0.1", int(sys.argv[2]))).serve_forever()
