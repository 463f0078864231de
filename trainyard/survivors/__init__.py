"""When a rank dies, the others say which, and save what they have done."""

from trainyard.survivors.estate import Estate, outlived

__all__ = ["Estate", "outlived"]
