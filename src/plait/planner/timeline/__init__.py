"""One layer of a plan as bars on a time axis, for reports and traces."""

from plait.planner.timeline.layer import LayerChart, build_layer_charts

__all__ = ["LayerChart", "build_layer_charts"]
