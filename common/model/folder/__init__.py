"""What lies in a model folder, read and judged before torch is loaded."""
