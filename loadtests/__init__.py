"""Load tests and measurements. They speak HTTP, or run engines in processes of their own."""
