"""Ray Serve application: deployments, actors, transports. The only package that imports ray."""
