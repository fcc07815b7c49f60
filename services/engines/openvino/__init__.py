"""The `openvino` engine: converted transformers models on Intel devices.

Importing the library would send usage data to its makers, from forks of this process, unless the user had opted out
before. Both openvino and NNCF do without `openvino_telemetry` where it cannot be imported, and then send nothing.
"""

import sys

sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
