"""``python -m chasqui`` is ``chasquictl``."""

from __future__ import annotations

import sys

from chasqui.cli import main

sys.exit(main())
