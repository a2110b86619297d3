package caller

import (
	"context"
	"errors"
	"fmt"

	"google.golang.org/protobuf/types/known/durationpb"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/inside"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/mesh"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/suite"
)

// replays use what the server has given to another tenant, or was given by it.
func replays() []attempt {
	return []attempt{
		{name: "request_id of a create", does: "creates a sandbox of the same name with the request_id of another tenant's create", success: "the answer is that of the other tenant",
			run: func(ctx context.Context, s *mesh.Scene, _ *gateway) (string, error) {
				resp, err := s.Hostile.Sandboxes.CreateSandbox(ctx, &sandboxv1.CreateSandboxRequest{
					Namespace: s.Hostile.Namespace, Name: s.Target.Name, RequestId: s.Target.RequestID,
					Spec: &sandboxv1.SandboxSpec{Image: inside.RootImage, Pool: s.Hostile.Pool, Args: []string{"end"}, TerminationGracePeriod: durationpb.New(0)},
				})
				defer func() { _ = s.Hostile.Delete(context.WithoutCancel(ctx), s.Target.Name) }()
				switch {
				case err != nil:
					return "", err
				case resp.GetReplayed() || resp.GetSandbox().GetUid() == s.Target.UID || resp.GetSandbox().GetNamespace() != s.Hostile.Namespace:
					return fmt.Sprintf("the answer is %s", resp), nil
				}
				return "", errors.New("a sandbox of its own was made")
			}},
		{name: "uid of a sandbox", does: "deletes a sandbox of its own namespace that has the name and the uid of another tenant's", success: "the call succeeds, or that sandbox is deleted",
			run: func(ctx context.Context, s *mesh.Scene, _ *gateway) (string, error) {
				_, err := s.Hostile.Sandboxes.DeleteSandbox(ctx, &sandboxv1.DeleteSandboxRequest{Namespace: s.Hostile.Namespace, Name: s.Target.Name, Uid: s.Target.UID, RequestId: s.Target.RequestID})
				if err == nil {
					return "the call has succeeded", nil
				}
				return "", err
			}},
		{name: "page token", does: "lists its own namespace with a page token that another tenant was given", success: "the page has a sandbox of another tenant", harmless: true,
			run: func(ctx context.Context, s *mesh.Scene, _ *gateway) (string, error) {
				token, err := foreignToken(ctx, s)
				if err != nil {
					return "", suite.Brokenf("getting a page token: %w", err)
				}
				list, err := s.Hostile.Sandboxes.ListSandboxes(ctx, &sandboxv1.ListSandboxesRequest{Namespace: s.Hostile.Namespace, PageToken: token})
				if err != nil {
					return "", err
				}
				return contains(s, list.GetSandboxes())
			}},
		{name: "page token for all namespaces", does: "lists all namespaces with a page token that another tenant was given", success: "the call succeeds", harmless: true,
			run: func(ctx context.Context, s *mesh.Scene, _ *gateway) (string, error) {
				token, err := foreignToken(ctx, s)
				if err != nil {
					return "", suite.Brokenf("getting a page token: %w", err)
				}
				_, err = s.Hostile.Sandboxes.ListSandboxes(ctx, &sandboxv1.ListSandboxesRequest{PageToken: token})
				return allowed(err)
			}},
		{name: "log ticket", does: "uses a ticket for its own sandbox at the allocator", success: answered, harmless: true,
			run: func(ctx context.Context, s *mesh.Scene, _ *gateway) (string, error) {
				ticket, err := ownTicket(ctx, s)
				if err != nil {
					return "", suite.Brokenf("getting a ticket: %w", err)
				}
				conn, err := s.Dial(ticket)
				if err != nil {
					return "", suite.Brokenf("connecting: %w", err)
				}
				return listAs(ctx, s, conn)
			}},
	}
}

// foreignToken returns a page token of the other tenant, which needs two sandboxes for it.
func foreignToken(ctx context.Context, s *mesh.Scene) (string, error) {
	const second = "second"
	_, err := s.Victim.Create(ctx, second, &sandboxv1.SandboxSpec{Image: inside.RootImage, Args: []string{"end"}})
	if err != nil {
		return "", err
	}
	defer func() { _ = s.Victim.Delete(context.WithoutCancel(ctx), second) }()
	list, err := s.Victim.Sandboxes.ListSandboxes(ctx, &sandboxv1.ListSandboxesRequest{Namespace: s.Victim.Namespace, PageSize: 1})
	if err != nil {
		return "", err
	}
	if list.GetNextPageToken() == "" {
		return "", errors.New("the list has one page")
	}
	return list.GetNextPageToken(), nil
}
