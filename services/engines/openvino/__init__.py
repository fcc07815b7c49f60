"""The `openvino` engine: converted transformers models on Intel devices.

Importing the library would send usage data to its makers, without asking and from forks of this process. No setting
prevents that in a library, but both openvino and NNCF do without `openvino_telemetry` where it cannot be imported.
"""

import sys

sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
