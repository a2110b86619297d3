package mesh

import (
	"context"
	"fmt"
	"time"

	"github.com/containerd/errdefs"
	"github.com/google/uuid"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
)

const removeTime = time.Minute

// Command is what every series runs: it does nothing, and exits at once on SIGTERM.
func Command() []string { return []string{"sleep", "86400"} }

// Request asks for a sandbox in a pool.
func Request(pool string, mode sandboxv1.ConsistencyMode) *sandboxv1.CreateSandboxRequest {
	return &sandboxv1.CreateSandboxRequest{
		Namespace: Namespace, Name: "bench-" + uuid.NewString()[:13], RequestId: uuid.NewString(),
		Spec: &sandboxv1.SandboxSpec{
			Image: Image, Pool: pool, Command: Command(), ConsistencyMode: mode, TerminationGracePeriod: durationpb.New(0),
		},
	}
}

// Delete deletes a sandbox and waits until neither the API server nor the node knows it: what is left of one sample must
// not disturb the next.
func (m *Mesh) Delete(ctx context.Context, s *sandboxv1.Sandbox) error {
	if err := m.AskDelete(ctx, s); err != nil {
		return err
	}
	return m.AwaitGone(ctx, s)
}

// AskDelete has a sandbox deleted and does not wait.
func (m *Mesh) AskDelete(ctx context.Context, s *sandboxv1.Sandbox) error {
	_, err := m.Sandboxes.DeleteSandbox(ctx, &sandboxv1.DeleteSandboxRequest{
		Namespace: s.GetNamespace(), Name: s.GetName(), GracePeriod: durationpb.New(0),
	})
	if err != nil && status.Code(err) != codes.NotFound {
		return fmt.Errorf("deleting sandbox %s: %w", s.GetName(), err)
	}
	return nil
}

// AwaitGone waits until nothing of a sandbox is left.
func (m *Mesh) AwaitGone(ctx context.Context, s *sandboxv1.Sandbox) error {
	return Poll(ctx, 50*time.Millisecond, removeTime, func(ctx context.Context) error {
		err := m.Kube.Get(ctx, client.ObjectKey{Namespace: s.GetNamespace(), Name: s.GetName()}, &v1alpha1.Sandbox{})
		if !apierrors.IsNotFound(err) {
			return fmt.Errorf("the custom resource of sandbox %s is left: %w", s.GetName(), err)
		}
		if id := s.GetStatus().GetSandboxId(); id != "" {
			if _, err := m.Node.ContainerService().Get(ctx, id); !errdefs.IsNotFound(err) {
				return fmt.Errorf("the container of sandbox %s is left: %w", s.GetName(), err)
			}
		}
		return nil
	})
}
