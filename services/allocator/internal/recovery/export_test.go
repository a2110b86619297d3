package recovery

import "context"

// Sweep sweeps once.
func (r *Recoverer) Sweep(ctx context.Context) { r.sweep(ctx) }
