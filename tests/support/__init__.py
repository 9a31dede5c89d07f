"""What tests and benchmarks are made with: worlds whose truth is known, tiny models, servers, databases, stubs."""
