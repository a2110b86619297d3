// Package rpc serves AgentService: it translates between the API's messages and the calls of the packages that do the work,
// one file for each RPC. It decides nothing and keeps no state of sandboxes. All of it may be called concurrently.
package rpc

import (
	"time"

	"github.com/google/uuid"
	"go.opentelemetry.io/otel/attribute"
	"google.golang.org/protobuf/types/known/durationpb"
	"k8s.io/utils/clock"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/logs"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/pin"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/sandbox"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/status"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

// Config is what a Service needs.
type Config struct {
	// Sandboxes carries out the calls on sandboxes.
	Sandboxes *sandbox.Manager
	// Status has the snapshot and the watches.
	Status *status.Hub
	// Pinned keeps the images that SetPinnedImages lists.
	Pinned *pin.Keeper
	// Logs has the sandboxes' output.
	Logs *logs.Store
	// Runtime pulls images.
	Runtime runtime.Runtime
	// Clock; nil is the real one.
	Clock clock.WithTicker
}

// Service is the agent's API. Make it with New.
type Service struct {
	agentv1.UnimplementedAgentServiceServer

	config Config
	// epoch names this agent process.
	epoch string
	// closing is closed when streams without an end have to end.
	closing <-chan struct{}
}

// New returns a Service. Streams without an end (watches, followed logs) end when closing is closed.
func New(cfg Config, closing <-chan struct{}) *Service {
	if cfg.Clock == nil {
		cfg.Clock = clock.RealClock{}
	}
	return &Service{config: cfg, epoch: uuid.NewString(), closing: closing}
}

func duration(d time.Duration) *durationpb.Duration { return durationpb.New(d) }

// fenceAttributes returns the span attributes of a fence.
func fenceAttributes(f *agentv1.Fence) []attribute.KeyValue {
	return []attribute.KeyValue{
		attribute.String(obs.AttrSandboxUID, f.GetSandboxUid()), attribute.Int64(obs.AttrAttempt, f.GetAttempt()),
		attribute.String(obs.AttrAgentUID, f.GetAgentUid()),
	}
}
