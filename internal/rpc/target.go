package rpc

import (
	"context"
	"strconv"
	"strings"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc/metadata"

	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// targetKey is the metadata key by which a proxy names the container that a call about a sandbox is meant for.
const targetKey = "fast-sandbox-target"

// Target identifies a container of a sandbox on an agent.
type Target struct {
	SandboxUID string
	Attempt    int64
	AgentUID   string
}

// ForTarget returns a context whose calls are meant for a container: an agent refuses them if it is another one now.
func ForTarget(ctx context.Context, t Target) context.Context {
	return metadata.AppendToOutgoingContext(ctx, targetKey, t.SandboxUID+"/"+strconv.FormatInt(t.Attempt, 10)+"/"+t.AgentUID)
}

// TargetOf returns the container that a call is meant for.
func TargetOf(ctx context.Context) (Target, error) {
	values := metadata.ValueFromIncomingContext(ctx, targetKey)
	if len(values) == 1 {
		if parts := strings.Split(values[0], "/"); len(parts) == 3 && parts[0] != "" && parts[2] != "" {
			if attempt, err := strconv.ParseInt(parts[1], 10, 64); err == nil && attempt > 0 {
				return Target{parts[0], attempt, parts[2]}, nil
			}
		}
	}
	return Target{}, fault.New(errdefs.ErrInvalidArgument, fault.InvalidField, "the metadata %s must name the container that is meant, as uid/attempt/agent", targetKey).
		With(fault.FieldKey, targetKey)
}
