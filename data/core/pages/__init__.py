"""The design of every page: layout, style sheet, parts, sorting of tables; imports ``data.core`` alone."""
