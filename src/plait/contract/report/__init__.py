"""What contracts say, put together for people and programs: totals, tile sizes, docstring tables, records."""
