"""pshard-export: cuts a model by layers into OpenVINO shards.

Importing openvino sends usage reports to an analytics service, from forked child processes, without asking. Nothing that PShard runs does
that: the package that sends them is made unimportable before openvino is imported, which it provides for.
"""

import sys

sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # None is how the import system spells "not there"
