"""swarm-dashboard: a page in the browser that shows running swarms."""
