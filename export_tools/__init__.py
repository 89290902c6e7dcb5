"""pshard-export: cuts a model by layers into OpenVINO shards."""
