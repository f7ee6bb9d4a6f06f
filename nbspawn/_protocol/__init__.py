"""What kernel, ranks and helpers say to each other: plain data for all sides, and how it is sent."""
