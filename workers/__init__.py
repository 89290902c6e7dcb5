"""pshard-worker: serves one or more stages of a bundle.

Importing openvino sends usage reports to an analytics service, from forked child processes, without asking. A worker does not: the
package that sends them is made unimportable before openvino is imported, which openvino provides for.
"""

import sys

sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # None is how the import system spells "not there"
