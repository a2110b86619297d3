package components

import (
	"fmt"
	"os"

	"k8s.io/client-go/tools/clientcmd"
	api "k8s.io/client-go/tools/clientcmd/api"
)

// kubeconfigs renders the components' kubeconfigs, which point to certificate files.
func (c Config) kubeconfigs() ([]File, error) {
	var files []File
	for _, name := range []string{ControllerManager, Scheduler, Kubelet, Proxy} {
		certificate := c.certificate(name)
		raw, err := kubeconfig(api.Cluster{CertificateAuthority: c.CA()},
			api.AuthInfo{ClientCertificate: certificate.Cert, ClientKey: certificate.Key})
		if err != nil {
			return nil, err
		}
		files = append(files, File{Path: c.conf(name + ".kubeconfig"), Content: raw})
	}
	return files, nil
}

// AdminKubeconfig renders the administrator's kubeconfig, which holds its certificates itself and so can be copied. The
// certificates must exist.
func (c Config) AdminKubeconfig() ([]byte, error) {
	var contents [3][]byte
	files := c.certificate(admin)
	for i, path := range []string{c.CA(), files.Cert, files.Key} {
		raw, err := os.ReadFile(path)
		if err != nil {
			return nil, fmt.Errorf("reading a certificate for the kubeconfig: %w", err)
		}
		contents[i] = raw
	}
	return kubeconfig(api.Cluster{CertificateAuthorityData: contents[0]},
		api.AuthInfo{ClientCertificateData: contents[1], ClientKeyData: contents[2]})
}

func kubeconfig(cluster api.Cluster, user api.AuthInfo) ([]byte, error) {
	cluster.Server = APIServerURL()
	raw, err := clientcmd.Write(api.Config{
		Clusters:       map[string]*api.Cluster{NodeName: &cluster},
		AuthInfos:      map[string]*api.AuthInfo{NodeName: &user},
		Contexts:       map[string]*api.Context{NodeName: {Cluster: NodeName, AuthInfo: NodeName}},
		CurrentContext: NodeName,
	})
	if err != nil {
		return nil, fmt.Errorf("rendering a kubeconfig: %w", err)
	}
	return raw, nil
}
