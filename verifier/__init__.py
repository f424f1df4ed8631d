"""The verifier: target model, paged keys and values, feature capture, sampling, acceptance."""
