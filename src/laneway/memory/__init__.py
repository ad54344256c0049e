"""Memory in tiers: what is kept on the device, what moves to the host or a disk, and what is made again."""
