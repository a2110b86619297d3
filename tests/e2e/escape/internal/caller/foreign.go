package caller

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/google/uuid"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/fieldmaskpb"

	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	authv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/auth/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/inside"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/mesh"
)

// call makes one call as the hostile tenant, about the target's name in a namespace.
type call struct {
	name string
	run  func(ctx context.Context, t *mesh.Tenant, namespace string, target *mesh.Target) error
}

func calls() []call {
	return []call{
		{"get", func(ctx context.Context, t *mesh.Tenant, ns string, v *mesh.Target) error {
			_, err := t.Sandboxes.GetSandbox(ctx, &sandboxv1.GetSandboxRequest{Namespace: ns, Name: v.Name})
			return err
		}},
		{"list", func(ctx context.Context, t *mesh.Tenant, ns string, _ *mesh.Target) error {
			_, err := t.Sandboxes.ListSandboxes(ctx, &sandboxv1.ListSandboxesRequest{Namespace: ns})
			return err
		}},
		{"watch", func(ctx context.Context, t *mesh.Tenant, ns string, _ *mesh.Target) error {
			return firstMessage(t.Sandboxes.WatchSandboxes(ctx, &sandboxv1.WatchSandboxesRequest{Namespace: ns}))
		}},
		{"logs", func(ctx context.Context, t *mesh.Tenant, ns string, v *mesh.Target) error {
			return firstMessage(t.Sandboxes.StreamLogs(ctx, &sandboxv1.StreamLogsRequest{Namespace: ns, Name: v.Name}))
		}},
		{"log ticket", func(ctx context.Context, t *mesh.Tenant, ns string, v *mesh.Target) error {
			_, err := t.Sandboxes.CreateLogTicket(ctx, &sandboxv1.CreateLogTicketRequest{Namespace: ns, Name: v.Name})
			return err
		}},
		{"create", func(ctx context.Context, t *mesh.Tenant, ns string, v *mesh.Target) error {
			_, err := t.Sandboxes.CreateSandbox(ctx, &sandboxv1.CreateSandboxRequest{Namespace: ns, Name: "foreign-" + uuid.NewString()[:8], RequestId: uuid.NewString(),
				Spec: &sandboxv1.SandboxSpec{Image: inside.RootImage, Pool: v.Tenant.Pool, Args: []string{"end"}}})
			return err
		}},
		{"update", func(ctx context.Context, t *mesh.Tenant, ns string, v *mesh.Target) error {
			_, err := t.Sandboxes.UpdateSandbox(ctx, &sandboxv1.UpdateSandboxRequest{Sandbox: &sandboxv1.Sandbox{Namespace: ns, Name: v.Name, Labels: map[string]string{"owned": "yes"}},
				UpdateMask: &fieldmaskpb.FieldMask{Paths: []string{"labels"}}})
			return err
		}},
		{"delete", func(ctx context.Context, t *mesh.Tenant, ns string, v *mesh.Target) error {
			_, err := t.Sandboxes.DeleteSandbox(ctx, &sandboxv1.DeleteSandboxRequest{Namespace: ns, Name: v.Name, Uid: v.UID, GracePeriod: durationpb.New(0)})
			return err
		}},
		{"list agents", func(ctx context.Context, t *mesh.Tenant, ns string, _ *mesh.Target) error {
			_, err := t.Allocator.ListAgents(ctx, &allocatorv1.ListAgentsRequest{Namespace: ns})
			return err
		}},
		{"watch agents", func(ctx context.Context, t *mesh.Tenant, ns string, _ *mesh.Target) error {
			return firstMessage(t.Allocator.WatchAgents(ctx, &allocatorv1.WatchAgentsRequest{Namespace: ns}))
		}},
		{"list pools", func(ctx context.Context, t *mesh.Tenant, ns string, _ *mesh.Target) error {
			_, err := t.Allocator.ListPools(ctx, &allocatorv1.ListPoolsRequest{Namespace: ns})
			return err
		}},
		{"get pool", func(ctx context.Context, t *mesh.Tenant, ns string, v *mesh.Target) error {
			_, err := t.Allocator.GetPool(ctx, &allocatorv1.GetPoolRequest{Namespace: ns, Name: v.Tenant.Pool})
			return err
		}},
		{"list images", func(ctx context.Context, t *mesh.Tenant, ns string, v *mesh.Target) error {
			_, err := t.Allocator.ListImages(ctx, &allocatorv1.ListImagesRequest{Namespace: ns, Pool: v.Tenant.Pool})
			return err
		}},
		{"pull image", func(ctx context.Context, t *mesh.Tenant, ns string, v *mesh.Target) error {
			return firstMessage(t.Allocator.PullImage(ctx, &allocatorv1.PullImageRequest{Namespace: ns, Pool: v.Tenant.Pool, Image: inside.RootImage}))
		}},
		{"create API key", func(ctx context.Context, t *mesh.Tenant, ns string, _ *mesh.Target) error {
			_, err := t.Auth.CreateAPIKey(ctx, &authv1.CreateAPIKeyRequest{Namespace: ns, ServiceAccount: "tenant"})
			return err
		}},
		{"list API keys", func(ctx context.Context, t *mesh.Tenant, ns string, _ *mesh.Target) error {
			_, err := t.Auth.ListAPIKeys(ctx, &authv1.ListAPIKeysRequest{Namespace: ns})
			return err
		}},
		{"revoke API key", func(ctx context.Context, t *mesh.Tenant, ns string, _ *mesh.Target) error {
			_, err := t.Auth.RevokeAPIKey(ctx, &authv1.RevokeAPIKeyRequest{Namespace: ns, Id: "aaaaaaaaaaaaaaaa"})
			return err
		}},
	}
}

// receiver is a stream of messages.
type receiver[T any] interface{ Recv() (*T, error) }

// firstMessage returns the error of a stream, or nil if it sends a message or ends without an error.
func firstMessage[T any, S receiver[T]](stream S, err error) error {
	if err != nil {
		return err
	}
	if _, err = stream.Recv(); errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

func foreignCalls() []attempt {
	var out []attempt
	for _, c := range calls() {
		in := func(kind, namespace string) attempt {
			return attempt{
				name: c.name + " in " + kind, does: "calls with the token of a tenant who has no right there", success: "the answer is not that it is forbidden, or the sandbox has changed",
				run: func(ctx context.Context, s *mesh.Scene, _ *gateway) (string, error) {
					ns := namespace
					if ns == "victim" {
						ns = s.Victim.Namespace
					}
					calling, cancel := context.WithTimeout(ctx, callTime)
					defer cancel()
					return allowed(c.run(calling, s.Hostile, ns, s.Target))
				},
			}
		}
		out = append(out, in("the namespace of another tenant", "victim"), in("all namespaces", ""), in("the namespace of the mesh", mesh.System))
	}
	return append(out, attempt{
		name: "tell names apart", does: "asks for a sandbox of another tenant, and for one that does not exist", success: "the answers differ in more than the name",
		run: func(ctx context.Context, s *mesh.Scene, _ *gateway) (string, error) {
			_, there := s.Hostile.Sandboxes.GetSandbox(ctx, &sandboxv1.GetSandboxRequest{Namespace: s.Victim.Namespace, Name: s.Target.Name})
			_, nowhere := s.Hostile.Sandboxes.GetSandbox(ctx, &sandboxv1.GetSandboxRequest{Namespace: s.Victim.Namespace, Name: "nowhere"})
			if status.Code(there) == codes.OK || status.Code(there) != status.Code(nowhere) || status.Convert(there).Message() != status.Convert(nowhere).Message() {
				return fmt.Sprintf("%v; %v", there, nowhere), nil
			}
			return "", there
		}, harmless: true,
	})
}
