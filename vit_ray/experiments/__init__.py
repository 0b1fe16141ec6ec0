"""Many runs under one parent: sweeps and scaling studies."""
