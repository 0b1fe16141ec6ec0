"""What a data set is on disk: columns, manifest, row groups, shards."""
