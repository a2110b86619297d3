package budget

import "slices"

// ownCreate is that of handler fsb.
func ownCreate() []Budget {
	return slices.Concat([]Budget{
		{Key: "slot_over_raw_p50", Limit: 0.10, Aim: 0.06, What: "fast create with a slot, p50, over raw containerd p50"},
		{Key: "slot_over_raw_p99", Limit: 0.25, Aim: 0.15, What: "fast create with a slot, p99, over raw containerd p50"},
		{Key: "cold_over_raw_p50", Limit: 0.25, Aim: 0.15, What: "fast create on the cold path, p50, over raw containerd p50"},
		{Key: "users_on_over_off_p50", Limit: 1.05, What: "fast create with a slot with user namespaces, p50, over one without"},
	}, anyCreate())
}

// ownBurst is what handler fsb is held to beside what all are.
func ownBurst() []Budget {
	return []Budget{
		{Key: "none_p99_over_raw_p50", Limit: 6, What: "burst with slots for none: p99 over the p50 of single raw containerd creates"},
		{Key: "refill_per_s", Least: 100, AtLeast: true, What: "slots that come back each second on an idle machine, all of them claimed"},
	}
}

// Rate is that of creates and deletes at a constant rate. Only handler fsb is held to it.
func Rate(handler string) []Budget {
	if handler != Own {
		return nil
	}
	return []Budget{
		{Key: "rate_over_raw", Least: 4, AtLeast: true, What: "creates and deletes each second over those of raw containerd, 2 in parallel"},
		{Key: "cpu_over_raw", Limit: 0.35, What: "CPU time of one create and delete over that of a raw container"},
	}
}

// ownDensity is that of handler fsb.
func ownDensity() []Budget {
	return []Budget{
		{Key: "free_slot_mib", Limit: 1.5, What: "PSS of a free slot with its share of the shim, MiB"},
		{Key: "claimed_mib", Limit: 2, What: "PSS of a sandbox that claimed a slot with its share of the shim, MiB"},
	}
}
