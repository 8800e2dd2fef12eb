"""The live page: what a browser shows of the cluster.

The files beside this module are sent as they are, without a build step: ``index.html``, ``page.css``, ES modules that
read the REST API, and uPlot, which draws the chart (MIT, ``uPlot.LICENSE``).
"""
