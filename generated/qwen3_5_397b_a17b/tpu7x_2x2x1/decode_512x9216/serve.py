# Emitted by moec; do not edit. Regenerate: moec compile qwen3.5-397b-a17b --target tpu7x:2x2x1 --workload decode_512x9216
# Digests: spec a912a5398831487d, target 8c7a408c9f47814c, workload 919da80e67124d21, overrides 4f53cda18c2baa0c, plan 63824eb498475da7
"""Complete prompts with qwen3.5-397b-a17b: python -m THIS_PACKAGE.serve --weights DIR < prompts.txt"""

import sys

from moec.runtime.lines import main

from . import model

if __name__ == "__main__":
    sys.exit(main(model, sys.argv[1:], sys.stdin, sys.stdout))
