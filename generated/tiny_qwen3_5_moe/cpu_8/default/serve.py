# Emitted by moec; do not edit. Regenerate: moec compile tiny/qwen3_5_moe --target cpu:8 --workload default
# Digests: spec 2e982e786557aadc, target 57776177cc6d0b90, workload aff6b214b470e3f4, overrides 4f53cda18c2baa0c, plan 6108b0c41458c893
"""Complete prompts with tiny_qwen3_5_moe: python -m THIS_PACKAGE.serve --weights DIR < prompts.txt"""

import sys

from moec.runtime.lines import main

from . import model

if __name__ == "__main__":
    sys.exit(main(model, sys.argv[1:], sys.stdin, sys.stdout))
