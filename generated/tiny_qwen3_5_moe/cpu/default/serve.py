# Emitted by moec; do not edit. Regenerate: moec compile tiny/qwen3_5_moe --target cpu --workload default
# Digests: spec 9d322b78f05cb9d7, target 554b28de4009108f, workload aff6b214b470e3f4, overrides 4f53cda18c2baa0c, plan 1c631f032d7ec1cf
"""Complete prompts with tiny_qwen3_5_moe: python -m THIS_PACKAGE.serve --weights DIR < prompts.txt"""

import sys

from moec.runtime.lines import main

from . import model

if __name__ == "__main__":
    sys.exit(main(model, sys.argv[1:], sys.stdin, sys.stdout))
