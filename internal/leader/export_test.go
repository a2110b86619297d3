package leader

import (
	"context"
	"time"
)

// Confirm is Elector.Confirm with an age.
var Confirm = func(ctx context.Context, e *Elector, age time.Duration) (bool, error) { return e.confirm(ctx, age) }
