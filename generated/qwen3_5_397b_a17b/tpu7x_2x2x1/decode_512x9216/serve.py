# Emitted by moec; do not edit. Regenerate: moec compile qwen3.5-397b-a17b --target tpu7x:2x2x1 --workload decode_512x9216
# Digests: spec 6513ea3c0020bc84, target 4b5c2107c766fdad, workload 919da80e67124d21, overrides 4f53cda18c2baa0c, plan 86c0030bedf33ced
"""Complete prompts with qwen3.5-397b-a17b: python -m THIS_PACKAGE.serve --weights DIR < prompts.txt"""

import sys

from moec.runtime.lines import main

from . import model

if __name__ == "__main__":
    sys.exit(main(model, sys.argv[1:], sys.stdin, sys.stdout))
