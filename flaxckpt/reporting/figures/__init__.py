"""The plots of the page. Each module makes one: from facts to what Plotly draws. Pure."""
