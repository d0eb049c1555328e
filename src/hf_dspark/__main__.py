"""`python -m hf_dspark`: the `hf-dspark` command, for launchers that start a module."""

import sys

from .cli import main

sys.exit(main())
