package mesh

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/host"
)

// podsCgroup has the Pods of the local cluster (deploy/local).
const podsCgroup = "/fsb-local/kubepods"

// Agent connects to the one agent of a sandbox's pool as the gateway does, with its certificate. Calls with the context that it returns are for the sandbox.
func (m *Mesh) Agent(ctx context.Context, s *sandboxv1.Sandbox) (context.Context, *grpc.ClientConn, error) {
	agent, err := m.agent(ctx, s.GetSpec().GetPool())
	if err != nil {
		return ctx, nil, err
	}
	uid := agent.GetInfo().GetPodUid()
	var secret corev1.Secret
	if err := m.Kube.Get(ctx, client.ObjectKey{Namespace: system, Name: "gateway-client-tls"}, &secret); err != nil {
		return ctx, nil, fmt.Errorf("reading the gateway's certificate: %w", err)
	}
	dir, err := os.MkdirTemp("", "fsb-bench-")
	if err != nil {
		return ctx, nil, fmt.Errorf("making a directory: %w", err)
	}
	m.dirs = append(m.dirs, dir)
	files := map[string]string{corev1.TLSCertKey: "", corev1.TLSPrivateKeyKey: "", "ca.crt": ""}
	for key := range files {
		files[key] = filepath.Join(dir, key)
		if err := os.WriteFile(files[key], secret.Data[key], 0o600); err != nil {
			return ctx, nil, fmt.Errorf("writing the gateway's certificate: %w", err)
		}
	}
	conn, err := rpc.Dial(agent.GetAddress(), rpc.ClientConfig{
		TLS:      rpc.TLS{CertFile: files[corev1.TLSCertKey], KeyFile: files[corev1.TLSPrivateKeyKey], CAFile: files["ca.crt"]},
		AgentUID: uid,
	})
	if err != nil {
		return ctx, nil, err
	}
	m.conns = append(m.conns, conn)
	return rpc.ForTarget(ctx, rpc.Target{SandboxUID: s.GetUid(), Attempt: s.GetStatus().GetAttempt(), AgentUID: uid}), conn, nil
}

// AgentCgroup is the path of the cgroup of the pool's agent, in the hierarchy of host.Cgroups.
func (m *Mesh) AgentCgroup(ctx context.Context, pool string) (string, error) {
	uid, err := m.AgentUID(ctx, pool)
	if err != nil {
		return "", err
	}
	cgroups, err := host.FindCgroups()
	if err != nil {
		return "", err
	}
	pods, err := cgroups.Pods(podsCgroup)
	if err == nil && pods[uid] == "" {
		err = errors.New("the agent has no cgroup")
	}
	return pods[uid], err
}
