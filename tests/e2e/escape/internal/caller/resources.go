package caller

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/inside"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/mesh"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/suite"
)

// followTime is how long the mesh has to follow a forged resource.
const followTime = 5 * time.Second

// resources are attempts by way of the API server, where the tenant may write Sandboxes of its own namespace.
func resources() []attempt {
	out := []attempt{
		forbidden("read Sandboxes of another tenant", func(ctx context.Context, s *mesh.Scene) error {
			return s.Hostile.Kube.Get(ctx, client.ObjectKey{Namespace: s.Victim.Namespace, Name: s.Target.Name}, &v1alpha1.Sandbox{})
		}),
		forbidden("write a Sandbox of another tenant", func(ctx context.Context, s *mesh.Scene) error {
			return s.Hostile.Kube.Create(ctx, resource(s.Victim.Namespace, "foreign-kube", s.Victim.Pool))
		}),
		forbidden("write the status of a Sandbox", func(ctx context.Context, s *mesh.Scene) error {
			box := resource(s.Hostile.Namespace, mesh.Roommate, s.Hostile.Pool)
			return s.Hostile.Kube.Status().Patch(ctx, box, client.RawPatch("application/merge-patch+json", []byte(`{"status":{"phase":"Failed"}}`)))
		}),
		forbidden("write a SandboxPool", func(ctx context.Context, s *mesh.Scene) error {
			return s.Hostile.Kube.Create(ctx, &v1alpha1.SandboxPool{ObjectMeta: metav1.ObjectMeta{Namespace: s.Hostile.Namespace, Name: "mine"}})
		}),
		forbidden("read the certificate of an agent", func(ctx context.Context, s *mesh.Scene) error {
			return s.Hostile.Kube.Get(ctx, client.ObjectKey{Namespace: s.Victim.Namespace, Name: s.Target.AgentPod + "-tls"}, &corev1.Secret{})
		}),
		forbidden("read API keys", func(ctx context.Context, s *mesh.Scene) error {
			return s.Hostile.Kube.List(ctx, &corev1.SecretList{}, client.InNamespace("fast-sandbox-apikeys"))
		}),
	}
	for name, annotations := range map[string]func(s *mesh.Scene) map[string]string{
		"assignment":                 func(s *mesh.Scene) map[string]string { return assignment(s, s.Target.UID, nil) },
		"assignment with an own uid": func(s *mesh.Scene) map[string]string { return assignment(s, "", nil) },
		"uid": func(s *mesh.Scene) map[string]string {
			return map[string]string{v1alpha1.AnnotationSandboxUID: s.Target.UID}
		},
		"superseded": func(s *mesh.Scene) map[string]string {
			return assignment(s, "", []v1alpha1.Superseded{{AgentPod: s.Target.AgentPod, AgentUID: s.Target.AgentUID, AgentAddress: agentAddress(s), SandboxUID: s.Target.UID, Attempt: s.Target.Attempt}})
		},
	} {
		out = append(out, attempt{name: "forged annotation: " + name, does: "writes a Sandbox whose annotation names the container of another tenant's, reads its output, and deletes it",
			success: "the output is that of the other tenant, or its sandbox has changed",
			run: func(ctx context.Context, s *mesh.Scene, _ *gateway) (string, error) {
				return forge(ctx, s, annotations(s))
			}})
	}
	return out
}

// forbidden is a request that the API server itself must refuse.
func forbidden(name string, request func(ctx context.Context, s *mesh.Scene) error) attempt {
	return attempt{name: name, does: "asks the API server with the tenant's own token", success: "the API server does not refuse it",
		run: func(ctx context.Context, s *mesh.Scene, _ *gateway) (string, error) {
			err := request(ctx, s)
			switch {
			case apierrors.IsForbidden(err):
				return "", err
			case err == nil, apierrors.IsNotFound(err), apierrors.IsInvalid(err), apierrors.IsAlreadyExists(err):
				return fmt.Sprintf("the answer is %v", err), nil
			}
			return "", suite.Brokenf("asking the API server: %w", err)
		}}
}

func resource(namespace, name, pool string) *v1alpha1.Sandbox {
	return &v1alpha1.Sandbox{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec:       v1alpha1.SandboxSpec{Image: inside.RootImage, PoolRef: pool, Args: []string{"sleep", "60"}},
	}
}

func agentAddress(s *mesh.Scene) string { return s.Target.AgentIP + ":" + s.AgentPort() }

// assignment returns the annotation that assigns a Sandbox to the agent of the target; without a uid, to a container of its own there.
func assignment(s *mesh.Scene, uid string, superseded []v1alpha1.Superseded) map[string]string {
	a := v1alpha1.Assignment{
		AgentPod: s.Target.AgentPod, AgentUID: s.Target.AgentUID, NodeName: s.Target.NodeName, AgentAddress: agentAddress(s),
		SandboxUID: uid, Attempt: s.Target.Attempt, Superseded: superseded,
	}
	out := map[string]string{}
	if uid == "" {
		a.SandboxUID = "11111111-2222-3333-4444-555555555555"
		out[v1alpha1.AnnotationSandboxUID] = a.SandboxUID
	} else {
		a.Started = &v1alpha1.Started{SandboxID: s.Target.ContainerID, StartTime: metav1.NowMicro()}
		out[v1alpha1.AnnotationSandboxUID] = uid
	}
	raw, err := json.Marshal(a)
	if err != nil { // it has texts and numbers alone
		panic(err)
	}
	out[v1alpha1.AnnotationAssignment] = string(raw)
	return out
}

// forge writes a Sandbox with annotations, lets the mesh follow it, and deletes it again.
func forge(ctx context.Context, s *mesh.Scene, annotations map[string]string) (string, error) {
	const name = "forged"
	box := resource(s.Hostile.Namespace, name, s.Hostile.Pool)
	box.Annotations = annotations
	if err := s.Hostile.Kube.Create(ctx, box); err != nil {
		return "", fmt.Errorf("writing it: %w", err)
	}
	evidence := ""
	if err := mesh.Wait(ctx, followTime); err != nil {
		return "", suite.Brokenf("waiting: %w", err)
	}
	reading, cancel := context.WithTimeout(ctx, followTime)
	defer cancel()
	stream, err := s.Hostile.Sandboxes.StreamLogs(reading, &sandboxv1.StreamLogsRequest{Namespace: s.Hostile.Namespace, Name: name})
	if err == nil {
		if m, err := stream.Recv(); err == nil && strings.Contains(string(m.GetData()), `"sample"`) {
			evidence = fmt.Sprintf("the output is %.100q", m.GetData())
		}
	}
	deleting := context.WithoutCancel(ctx)
	if err := s.Hostile.Kube.Delete(deleting, box); client.IgnoreNotFound(err) != nil {
		return "", suite.Brokenf("deleting it: %w", err)
	}
	err = mesh.Poll(deleting, mesh.SettleTime, func(ctx context.Context) error {
		if err := s.Kube.Get(ctx, client.ObjectKeyFromObject(box), &v1alpha1.Sandbox{}); !apierrors.IsNotFound(err) {
			return errors.Join(errors.New("it is still there"), err)
		}
		return nil
	})
	if err != nil && evidence == "" {
		return "", suite.Brokenf("deleting it: %w", err)
	}
	return evidence, errors.New("it is not followed")
}
