package cluster

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/components"
	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/host"
	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/network"
	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/pki"
)

// ensureKubernetesPKI creates Kubernetes' certificates, where they are missing or old, and the administrator's kubeconfig.
func ensureKubernetesPKI(c components.Config, now time.Time) error {
	authorities := make(map[string]*pki.Authority)
	for _, name := range []string{components.AuthorityCluster, components.AuthorityFrontProxy} {
		authority, err := pki.EnsureAuthority(c.PKIDir(), name, now)
		if err != nil {
			return err
		}
		authorities[name] = authority
	}
	for _, certificate := range c.Certificates() {
		if err := authorities[certificate.Authority].Ensure(certificate.Files, certificate.Subject, now); err != nil {
			return err
		}
	}
	if err := pki.EnsureSigningKey(c.SigningKey()); err != nil {
		return err
	}
	kubeconfig, err := c.AdminKubeconfig()
	if err != nil {
		return err
	}
	_, err = host.WriteFile(c.Kubeconfig(), kubeconfig, 0o600)
	return err
}

// identity is the TLS material of one Fast Sandbox role.
type identity struct{ ca, cert, key []byte }

// ensureSandboxPKI creates Fast Sandbox's certificates, where they are missing or old, writes the client's into the client
// directory, and returns those of the servers by role.
func ensureSandboxPKI(c components.Config, now time.Time) (map[string]identity, error) {
	authority, err := pki.EnsureAuthority(c.SandboxPKIDir(), "ca", now)
	if err != nil {
		return nil, err
	}
	identities := make(map[string]identity)
	for _, role := range append(pki.ServerRoles(), pki.RoleClient) {
		files := pki.Files{
			Cert: filepath.Join(c.SandboxPKIDir(), role+".crt"), Key: filepath.Join(c.SandboxPKIDir(), role+".key"),
		}
		if err := authority.Ensure(files, pki.Role(role, net.ParseIP(network.NodeIP)), now); err != nil {
			return nil, err
		}
		cert, err := os.ReadFile(files.Cert)
		if err != nil {
			return nil, fmt.Errorf("reading a certificate: %w", err)
		}
		key, err := os.ReadFile(files.Key)
		if err != nil {
			return nil, fmt.Errorf("reading a key: %w", err)
		}
		identities[role] = identity{ca: authority.PEM, cert: cert, key: key}
	}
	mine := identities[pki.RoleClient]
	delete(identities, pki.RoleClient)
	for name, content := range map[string][]byte{"ca.crt": mine.ca, "tls.crt": mine.cert, "tls.key": mine.key} {
		if _, err := host.WriteFile(filepath.Join(c.ClientDir(), name), content, 0o600); err != nil {
			return nil, err
		}
	}
	return identities, nil
}
