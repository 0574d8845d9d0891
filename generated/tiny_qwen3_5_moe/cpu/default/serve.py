# Emitted by moec; do not edit. Regenerate: moec compile tiny/qwen3_5_moe --target cpu --workload default
# Digests: spec 2e982e786557aadc, target a9134ae57537eb7d, workload aff6b214b470e3f4, overrides 4f53cda18c2baa0c, plan 4ea8eed89226ffae
"""Complete prompts with tiny_qwen3_5_moe: python -m THIS_PACKAGE.serve --weights DIR < prompts.txt"""

import sys

from moec.runtime.lines import main

from . import model

if __name__ == "__main__":
    sys.exit(main(model, sys.argv[1:], sys.stdin, sys.stdout))
