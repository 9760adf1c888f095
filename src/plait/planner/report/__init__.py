"""A plan as one HTML page that works from disk, without a network: charts, who owns what, tables, provenance.

write_report(report, Path("report.html"))
"""

from plait.planner.report.write import check_can_write, write_report

__all__ = ["check_can_write", "write_report"]
