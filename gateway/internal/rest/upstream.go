package rest

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/grpc"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"k8s.io/utils/clock"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
)

const (
	checkTimeout  = 2 * time.Second
	checkInterval = 3 * time.Second
)

// Upstream observes whether the allocator can be reached.
type Upstream struct{ health healthv1.HealthClient }

// NewUpstream returns an Upstream that calls over conn.
func NewUpstream(conn grpc.ClientConnInterface) *Upstream {
	return &Upstream{healthv1.NewHealthClient(conn)}
}

// Check calls the health service of the allocator once. It blocks for at most two seconds.
func (u *Upstream) Check(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	got, err := u.health.Check(ctx, &healthv1.HealthCheckRequest{Service: sandboxv1.SandboxService_ServiceDesc.ServiceName}, grpc.WaitForReady(true))
	if err != nil {
		return fmt.Errorf("checking the health of the allocator: %w", err)
	}
	if got.GetStatus() != healthv1.HealthCheckResponse_SERVING {
		return fmt.Errorf("checking the health of the allocator: status is %s", got.GetStatus())
	}
	return nil
}

// Follow checks until ctx ends. It reports the first result and every change.
func (u *Upstream) Follow(ctx context.Context, c clock.Clock, report func(error)) {
	known, good := false, false
	for ctx.Err() == nil {
		err := u.Check(ctx)
		if ctx.Err() == nil && (!known || good != (err == nil)) {
			known, good = true, err == nil
			report(err)
		}
		select {
		case <-ctx.Done():
		case <-c.After(checkInterval):
		}
	}
}
